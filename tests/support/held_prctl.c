/* Holds one call of prctl(PR_SET_PDEATHSIG) until the caller's parent has ended: the moment in which
 * the kernel sends the caller no signal. To be preloaded. The calls are counted by the files 1, 2, ...
 * in the folder HELD_PRCTL_FOLDER; the call HELD_PRCTL_NUMBER is held. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <unistd.h>

static int (*next_prctl)(int, ...);
static const char *folder;
static int held_number;

__attribute__((constructor)) static void prepare(void)
{
    folder = getenv("HELD_PRCTL_FOLDER");
    const char *number = getenv("HELD_PRCTL_NUMBER");
    held_number = number == NULL ? 0 : atoi(number);
}

static void count_and_hold(void)
{
    pid_t parent = getppid();
    for (int number = 1; number < 100; number++) {
        char path[4096];
        snprintf(path, sizeof path, "%s/%d", folder, number);
        int file = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        if (file < 0)
            continue;
        dprintf(file, "%d", (int)getpid());
        close(file);
        while (number == held_number && getppid() == parent)
            usleep(1000);
        return;
    }
}

int prctl(int option, ...)
{
    unsigned long words[4];
    va_list arguments;
    va_start(arguments, option);
    for (int i = 0; i < 4; i++)
        words[i] = va_arg(arguments, unsigned long);
    va_end(arguments);
    /* Other libraries may call this before this one is prepared. */
    if (next_prctl == NULL)
        *(void **)&next_prctl = dlsym(RTLD_NEXT, "prctl");
    if (option == PR_SET_PDEATHSIG && folder != NULL)
        count_and_hold();
    return next_prctl(option, words[0], words[1], words[2], words[3]);
}
