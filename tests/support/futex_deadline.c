/* Beside libfaketime, which shows another steady clock, but passes on deadlines by it to futex: a wait would last longer
 * by what was skipped. To be preloaded before it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SECOND_NS 1000000000L

static long ns(struct timespec time)
{
    return time.tv_sec * SECOND_NS + time.tv_nsec;
}

long syscall(long number, ...)
{
    static long (*next)(long, ...);
    struct timespec shown, true_now, deadline;
    long words[6];
    va_list arguments;
    va_start(arguments, number);
    for (int i = 0; i < 6; i++)
        words[i] = va_arg(arguments, long);
    va_end(arguments);
    if (next == NULL)
        *(void **)&next = dlsym(RTLD_NEXT, "syscall");
    if (number == SYS_futex && words[3] != 0 && (words[1] & FUTEX_CMD_MASK) == FUTEX_WAIT_BITSET &&
        !(words[1] & FUTEX_CLOCK_REALTIME)) {
        clock_gettime(CLOCK_MONOTONIC, &shown);
        next(SYS_clock_gettime, CLOCK_MONOTONIC, &true_now);
        long at = ns(*(struct timespec *)words[3]) - ns(shown) + ns(true_now);
        deadline.tv_sec = at / SECOND_NS;
        deadline.tv_nsec = at % SECOND_NS;
        words[3] = (long)&deadline;
    }
    return next(number, words[0], words[1], words[2], words[3], words[4], words[5]);
}
