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
 * Every other failed assertion ends the server as ever. So does this one on
 * processors other than x86-64: whatever started nbdkit has to start it again.
 */

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
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

/* The passphrase command is not nbdkit. */
static __attribute__ ((constructor)) void
keep_to_nbdkit (void)
{
  unsetenv ("LD_PRELOAD");
}
