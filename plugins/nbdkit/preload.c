/* Preloaded into nbdkit, which a client can end otherwise.
 *
 * When a connection breaks while replies are pending, the first thread that notices
 * closes nbdkit's sending side, and the next one that has a reply fails an assertion
 * about it (nbdkit 1.32.4 to 1.33.9): the whole server aborts, with every other
 * client's disk. Here that reply counts as sent, and the connection ends in order:
 *
 *     send_simple_reply         <- goes on here; raw_send_socket has returned 0
 *       raw_send_socket         <- its assertion has failed
 *         __assert_fail         <- this file's
 *
 * With TLS the same moment ends the TLS session's sending side while another thread
 * may be sending a reply (later versions, too). GnuTLS does not allow that, and the
 * heap is damaged. That step is left out: nbdkit ends the whole session when all
 * threads of the connection are done.
 *
 * nbdkit also answers every refusal to open an export with "unknown export", without a
 * text. The plugin leaves the true reason here, and it goes out in that answer's place.
 *
 * Every other failed assertion ends the server as ever. So does this one on
 * processors other than x86-64: whatever started nbdkit has to start it again.
 */

#include <dlfcn.h>
#include <endian.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <ucontext.h>
#include <unwind.h>

#define EXPORT __attribute__ ((visibility ("default")))

#ifdef __x86_64__

/* From this file's function over the one with the assertion to its caller. */
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

/* glibc's, which the compiler must not take for a function that never returns: the
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

/* Refusals. A connection negotiates in one thread. */

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

/* The answer for one that nbdkit sends; its length, or 0 where nbdkit's is to be sent. */
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
  /* It fits one record, which goes as a whole or not at all. */
  r = real (session, &answer, end);
  return r < 0 ? r : answered (length);
}

/* The passphrase command is not nbdkit. */
static __attribute__ ((constructor)) void
keep_to_nbdkit (void)
{
  unsetenv ("LD_PRELOAD");
}
