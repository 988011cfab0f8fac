/* Preloaded into nbdkit, which a client could otherwise end.
 *
 * When a connection breaks while replies are pending, the first thread that notices
 * closes nbdkit's sending side, and the next thread with a reply fails an assertion
 * about it (nbdkit 1.32.4 to 1.33.9): the whole server aborts, and all other clients
 * lose their disks. Here that reply counts as sent, and the connection ends in order:
 *
 *     send_simple_reply         <- continues here; raw_send_socket has returned 0
 *       raw_send_socket         <- its assertion has failed
 *         __assert_fail         <- this file's
 *
 * With TLS the same moment ends the TLS session's sending side while another thread
 * may be sending a reply (later versions, too). GnuTLS does not allow that, and the
 * heap is damaged. This library omits that step: nbdkit ends the whole session when
 * all threads of the connection are done.
 *
 * nbdkit also answers every refusal to open an export with "unknown export", without
 * a text. The plugin leaves the true reason here, and the library sends it in place
 * of that answer.
 *
 * When nbdkit gets a signal to end, it answers every request with ESHUTDOWN and waits
 * for its clients to leave. A guest sees I/O errors then, and an idle client never
 * leaves. If COLDRISE_DISCONNECT_AT_END is set, this library disconnects all clients
 * before nbdkit handles the signal. The
 * connections then end in order, sessions are flushed, and clients can reconnect.
 *
 * At the limit of open files nbdkit's accept loop spins, seals fail, and a connection
 * without its pipe leaks its socket. This library closes new connections before that.
 *
 * Every other failed assertion still ends the server, and so does this one on
 * processors other than x86-64: the program that started nbdkit must restart it.
 */

#include <dlfcn.h>
#include <errno.h>
#include <endian.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>
#include <unwind.h>

#define EXPORT __attribute__ ((visibility ("default")))

#ifdef __x86_64__

/* Returns from this file's function, past the one with the assertion, to its caller.
 */
#define FRAMES_TO_LEAVE 2

struct search {
  unsigned frames;
  ucontext_t found;
};

/* The registers that a function keeps for its caller, by their numbers in DWARF. */
static const struct {
  int dwarf;
  int saved;
} kept[] = {
  { 3, REG_RBX }, { 6, REG_RBP }, { 12, REG_R12 }, { 13, REG_R13 },
  { 14, REG_R14 }, { 15, REG_R15 },
};

static _Unwind_Reason_Code
visit (struct _Unwind_Context *frame, void *argument)
{
  struct search *search = argument;
  greg_t *registers = search->found.uc_mcontext.gregs;
  size_t i;

  if (search->frames++ < FRAMES_TO_LEAVE)
    return _URC_NO_REASON;
  for (i = 0; i < sizeof kept / sizeof kept[0]; i++)
    registers[kept[i].saved] = _Unwind_GetGR (frame, kept[i].dwarf);
  registers[REG_RSP] = _Unwind_GetCFA (frame);
  registers[REG_RIP] = _Unwind_GetIP (frame);
  return _URC_NORMAL_STOP;
}

#endif /* __x86_64__ */

/* glibc's. The compiler must not treat it as a function that never returns: the
 * frames above it are needed.
 */
EXPORT void
__assert_fail (const char *assertion, const char *file, unsigned line,
               const char *function)
{
  void (*real) (const char *, const char *, unsigned, const char *);

#ifdef __x86_64__
  if (function != NULL && strcmp (function, "raw_send_socket") == 0 &&
      strcmp (assertion, "sock >= 0") == 0) {
    struct search search = { 0 };

    if (getcontext (&search.found) == 0) {
      _Unwind_Backtrace (visit, &search);
      /* This sets the register of the result to 0. */
      if (search.frames > FRAMES_TO_LEAVE)
        setcontext (&search.found);
    }
  }
#endif
  real = (void (*) (const char *, const char *, unsigned, const char *))
    dlsym (RTLD_NEXT, "__assert_fail");
  if (real != NULL)
    real (assertion, file, line, function);
  abort ();
}

/* GNUTLS_SHUT_WR. */
#define SHUT_SENDING 1

EXPORT int
gnutls_bye (void *session, int how)
{
  int (*real) (void *, int);

  if (how == SHUT_SENDING)
    return 0;
  real = (int (*) (void *, int)) dlsym (RTLD_NEXT, "gnutls_bye");
  return real != NULL ? real (session, how) : 0;
}

/* Refusals. One thread negotiates a connection. */

struct option_reply {
  uint64_t magic;
  uint32_t option;
  uint32_t kind;
  uint32_t length;
} __attribute__ ((packed));

#define REPLY_MAGIC UINT64_C (0x3e889045565a9)
#define REPLY_UNKNOWN_EXPORT UINT32_C (0x80000006)
#define TEXT_MAX 4096

struct refusal {
  struct option_reply reply;
  char text[TEXT_MAX];
};

static __thread uint32_t refusal_kind;
static __thread char *refusal_text;

/* Called by the plugin when it refuses to open an export: `kind` is an NBD_REP_ERR_*. */
EXPORT void
coldrise_nbd_refuse (uint32_t kind, const char *text)
{
  free (refusal_text);
  refusal_kind = kind;
  refusal_text = strndup (text, TEXT_MAX);
}

/* The answer that replaces nbdkit's; returns its length, or 0 to keep nbdkit's. */
static size_t
true_answer (const void *sent, size_t sent_length, struct refusal *answer)
{
  size_t length;

  if (refusal_text == NULL || sent_length != sizeof answer->reply)
    return 0;
  memcpy (&answer->reply, sent, sizeof answer->reply);
  if (be64toh (answer->reply.magic) != REPLY_MAGIC ||
      be32toh (answer->reply.kind) != REPLY_UNKNOWN_EXPORT)
    return 0;
  length = strlen (refusal_text);
  memcpy (answer->text, refusal_text, length);
  answer->reply.kind = htobe32 (refusal_kind);
  answer->reply.length = htobe32 (length);
  return sizeof answer->reply + length;
}

static ssize_t
answered (size_t sent_length)
{
  free (refusal_text);
  refusal_text = NULL;
  return sent_length;
}

EXPORT ssize_t
send (int socket, const void *sent, size_t length, int flags)
{
  static ssize_t (*real) (int, const void *, size_t, int);
  struct refusal answer;
  size_t at, end;
  ssize_t r;

  if (real == NULL)
    real = (ssize_t (*) (int, const void *, size_t, int)) dlsym (RTLD_NEXT, "send");
  if (refusal_text == NULL ||
      (end = true_answer (sent, length, &answer)) == 0)
    return real (socket, sent, length, flags);
  for (at = 0; at < end; at += r) {
    r = real (socket, (const char *) &answer + at, end - at, flags);
    if (r == -1 && at == 0)
      return r;
    if (r == -1)
      r = 0;
  }
  return answered (length);
}

EXPORT ssize_t
gnutls_record_send (void *session, const void *sent, size_t length)
{
  static ssize_t (*real) (void *, const void *, size_t);
  struct refusal answer;
  size_t end;
  ssize_t r;

  if (real == NULL)
    real = (ssize_t (*) (void *, const void *, size_t)) dlsym (RTLD_NEXT, "gnutls_record_send");
  if (refusal_text == NULL ||
      (end = true_answer (sent, length, &answer)) == 0)
    return real (session, sent, length);
  /* It fits one record, which is sent completely or not at all. */
  r = real (session, &answer, end);
  return r < 0 ? r : answered (length);
}

/* The end of the server. */

/* Connections with larger descriptors get nbdkit's own treatment. */
#define SOCKETS_MAX (1 << 20)

#define DISCONNECT "COLDRISE_DISCONNECT_AT_END"

/* Every descriptor that was ever a client's: shutdown() of a file does nothing. */
static atomic_bool is_client[SOCKETS_MAX];
static atomic_int sockets_end;
static atomic_bool is_ending;

static void (*handle_end) (int);

/* Set by `serve nbd`. Under `boot` a guest ends first and flushes its disks, also after
 * a Ctrl-C, which reaches this process, too.
 */
static bool disconnects_at_end;

/* A signal handler, which may use nothing but system calls and atomic variables. */
static void
disconnect_clients (int signal_number)
{
  int i, err = errno;

  atomic_store (&is_ending, true);
  for (i = 0; i < atomic_load (&sockets_end); i++)
    if (atomic_load (&is_client[i]))
      shutdown (i, SHUT_RDWR);
  errno = err;
  handle_end (signal_number);
}

/* True from the acceptance of a connection until its thread has made its pipe. */
static atomic_bool is_starting;

static pthread_t main_thread;

/* Only nbdkit's main thread accepts NBD clients; the plugin's threads accept those of the
 * sessions' control sockets.
 */
EXPORT int
accept4 (int listener, struct sockaddr *address, socklen_t *length, int flags)
{
  static int (*real) (int, struct sockaddr *, socklen_t *, int);
  int client;

  if (real == NULL)
    real = (int (*) (int, struct sockaddr *, socklen_t *, int)) dlsym (RTLD_NEXT, "accept4");
  client = real (listener, address, length, flags);
  if (client >= 0 && pthread_equal (pthread_self (), main_thread))
    atomic_store (&is_starting, true);
  if (client < 0 || client >= SOCKETS_MAX)
    return client;
  atomic_store (&is_client[client], true);
  if (client >= atomic_load (&sockets_end))
    atomic_store (&sockets_end, client + 1);
  /* The signal may have come before the client was known. */
  if (atomic_load (&is_ending))
    shutdown (client, SHUT_RDWR);
  return client;
}

static bool
ends_nbdkit (int signal_number)
{
  return signal_number == SIGINT || signal_number == SIGTERM ||
         signal_number == SIGHUP || signal_number == SIGQUIT;
}

/* nbdkit has one handler for the signals that end it. */
EXPORT int
sigaction (int signal_number, const struct sigaction *action, struct sigaction *old)
{
  int (*real) (int, const struct sigaction *, struct sigaction *);
  struct sigaction ours;

  real = (int (*) (int, const struct sigaction *, struct sigaction *))
    dlsym (RTLD_NEXT, "sigaction");
  if (!disconnects_at_end || action == NULL || !ends_nbdkit (signal_number) || action->sa_flags & SA_SIGINFO ||
      action->sa_handler == SIG_DFL || action->sa_handler == SIG_IGN)
    return real (signal_number, action, old);
  handle_end = action->sa_handler;
  ours = *action;
  ours.sa_handler = disconnect_clients;
  return real (signal_number, &ours, old);
}

/* The limit of open files. */

/* Connections leave 3/8 of the limit free, at most this many descriptors: for sealed layers
 * (at most a quarter of the limit and 1,024), seals, and sessions.
 */
#define RESERVE_MAX 1536
/* Microseconds: between checks for a new connection's pipe, and if not even a refusal
 * has a descriptor.
 */
#define START_CHECK_US 100
#define START_CHECKS_MAX 100
#define EXHAUSTED_PAUSE_US 50000
#define LOG_INTERVAL_S 10

EXPORT int
pipe2 (int ends[2], int flags)
{
  int (*real) (int *, int) = (int (*) (int *, int)) dlsym (RTLD_NEXT, "pipe2");
  int r = real (ends, flags);

  atomic_store (&is_starting, false);
  return r;
}

/* Whether one more connection leaves the reserve free. */
static bool
has_room (int listener)
{
  struct rlimit limit;
  rlim_t reserve;
  int lowest, i;

  /* Its pipe counts. Without parallel requests a connection has none. */
  for (i = 0; i < START_CHECKS_MAX && atomic_load (&is_starting); i++)
    usleep (START_CHECK_US);
  atomic_store (&is_starting, false);
  lowest = fcntl (listener, F_DUPFD_CLOEXEC, 0);
  if (lowest < 0)
    return false;
  close (lowest);
  if (getrlimit (RLIMIT_NOFILE, &limit) != 0)
    return true;
  reserve = limit.rlim_cur / 8 * 3;
  if (reserve > RESERVE_MAX)
    reserve = RESERVE_MAX;
  return (rlim_t) lowest < limit.rlim_cur - reserve;
}

static void
refuse_connection (int listener)
{
  static time_t next_log;
  struct timespec now;
  int client = accept (listener, NULL, NULL);

  if (client >= 0)
    close (client);
  else
    usleep (EXHAUSTED_PAUSE_US);
  clock_gettime (CLOCK_MONOTONIC, &now);
  if (now.tv_sec < next_log)
    return;
  next_log = now.tv_sec + LOG_INTERVAL_S;
  fputs ("nbdkit: error: too many open files: new connections are refused until others end; "
         "raise the limit of open files (ulimit -Hn, LimitNOFILE)\n", stderr);
}

/* nbdkit waits here for connections, and accepts one if a listener is ready. */
EXPORT int
poll (struct pollfd *entries, nfds_t count, int timeout_ms)
{
  static int (*real) (struct pollfd *, nfds_t, int);
  int is_listener, r;
  socklen_t length;
  nfds_t i;

  if (real == NULL)
    real = (int (*) (struct pollfd *, nfds_t, int)) dlsym (RTLD_NEXT, "poll");
  r = real (entries, count, timeout_ms);
  if (r <= 0 || !pthread_equal (pthread_self (), main_thread))
    return r;
  for (i = 0; i < count; i++) {
    length = sizeof is_listener;
    if (!(entries[i].revents & POLLIN) ||
        getsockopt (entries[i].fd, SOL_SOCKET, SO_ACCEPTCONN, &is_listener, &length) != 0 ||
        !is_listener || has_room (entries[i].fd))
      continue;
    refuse_connection (entries[i].fd);
    entries[i].revents = 0;
    r--;
  }
  return r;
}

/* The passphrase command must run without this library. */
static __attribute__ ((constructor)) void
keep_to_nbdkit (void)
{
  main_thread = pthread_self ();
  disconnects_at_end = getenv (DISCONNECT) != NULL;
  unsetenv (DISCONNECT);
  unsetenv ("LD_PRELOAD");
}
