/* Holds one call of prctl(PR_SET_PDEATHSIG) until the caller's parent has ended: the moment in which
 * the kernel sends the caller no signal. To be preloaded.
 *
 * The file HELD_PRCTL, of 4 KiB, has numbers of 4 bytes: the call that is held, the number of calls
 * so far, and the callers' process ids. It is mapped, because a confined caller cannot write files. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#define BYTES 4096

static int (*next_prctl)(int, ...);
static int *words;

__attribute__((constructor)) static void prepare(void)
{
    const char *path = getenv("HELD_PRCTL");
    int file = path == NULL ? -1 : open(path, O_RDWR | O_CLOEXEC);
    if (file < 0)
        return;
    void *mapped = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (mapped != MAP_FAILED)
        words = mapped;
}

static void count_and_hold(void)
{
    pid_t parent = getppid();
    int number = __atomic_add_fetch(&words[1], 1, __ATOMIC_SEQ_CST);
    if (number + 1 < BYTES / (int)sizeof *words)
        __atomic_store_n(&words[number + 1], (int)getpid(), __ATOMIC_SEQ_CST);
    while (number == words[0] && getppid() == parent)
        usleep(1000);
}

int prctl(int option, ...)
{
    unsigned long rest[4];
    va_list arguments;
    va_start(arguments, option);
    for (int i = 0; i < 4; i++)
        rest[i] = va_arg(arguments, unsigned long);
    va_end(arguments);
    /* Other libraries may call this before this one is prepared. */
    if (next_prctl == NULL)
        *(void **)&next_prctl = dlsym(RTLD_NEXT, "prctl");
    if (option == PR_SET_PDEATHSIG && words != NULL)
        count_and_hold();
    return next_prctl(option, rest[0], rest[1], rest[2], rest[3]);
}
