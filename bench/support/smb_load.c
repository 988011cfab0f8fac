/* Random requests of 4 KiB to one file of an SMB share, by several processes with a connection each, because a
 * connection of libsmbclient has one request under way.
 *
 *   SMB_PASSWORD=… smb_load read|write|reread smb://HOST:PORT/SHARE/FILE USER BYTES PROCESSES SECONDS
 *
 * All open the file for writing, as a hypervisor does. `reread` reads the whole file once before. Prints the requests per second of all processes together. */

#include <fcntl.h>
#include <libsmbclient.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define BLOCK 4096
#define PIECE (1 << 20)

struct tally {
    volatile int ready, may_preread, go;
    volatile uint64_t done[256];
    double seconds[256];
};

static const char *user, *password;

static void credentials(const char *server, const char *share, char *group, int group_length, char *name,
                        int name_length, char *word, int word_length)
{
    (void)server, (void)share, (void)group, (void)group_length;
    snprintf(name, name_length, "%s", user);
    snprintf(word, word_length, "%s", password);
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static void fail(const char *what, const char *url)
{
    fprintf(stderr, "%s %s: ", what, url);
    perror(NULL);
    exit(1);
}

static void work(struct tally *tally, int number, const char *kind, const char *url, uint64_t blocks,
                 double seconds)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    int writes = !strcmp(kind, "write");
    char block[BLOCK];
    memset(block, 'x', BLOCK);
    srandom(number + 1);
    SMBCCTX *context = smbc_new_context();
    smbc_setFunctionAuthData(context, credentials);
    smbc_setOptionUseKerberos(context, 0);
    if (!smbc_init_context(context))
        fail("preparing", url);
    SMBCFILE *file = smbc_getFunctionOpen(context)(context, url, O_RDWR, 0);
    if (!file)
        fail("opening", url);
    smbc_lseek_fn seek = smbc_getFunctionLseek(context);
    smbc_read_fn get = smbc_getFunctionRead(context);
    smbc_write_fn put = smbc_getFunctionWrite(context);
    __sync_fetch_and_add(&tally->ready, 1);
    while (!tally->go) {
        /* Each opening empties caches, so one reads when all have opened it. */
        if (number == 0 && tally->may_preread && !strcmp(kind, "reread")) {
            char *piece = malloc(PIECE);
            for (off_t at = 0; piece && at < (off_t)(blocks * BLOCK); at += PIECE)
                if (seek(context, file, at, SEEK_SET) != at || get(context, file, piece, PIECE) < 0)
                    fail("reading", url);
            tally->may_preread = 0;
        }
        usleep(1000);
    }
    double began = now();
    do {
        off_t at = ((uint64_t)random() << 31 | random()) % blocks * BLOCK;
        if (seek(context, file, at, SEEK_SET) != at)
            fail("seeking in", url);
        if ((writes ? put(context, file, block, BLOCK) : get(context, file, block, BLOCK)) != BLOCK)
            fail(writes ? "writing" : "reading", url);
        tally->done[number]++;
    } while (now() - began < seconds);
    tally->seconds[number] = now() - began;
    /* Without closing: that would flush, after the time. */
    _exit(0);
}

int main(int count, char **words)
{
    if (count != 7)
        return fprintf(stderr, "usage: %s read|write|reread URL USER BYTES PROCESSES SECONDS\n", words[0]), 2;
    user = words[3];
    password = getenv("SMB_PASSWORD");
    int processes = atoi(words[5]);
    uint64_t blocks = strtoull(words[4], NULL, 10) / BLOCK;
    if (!password || processes < 1 || processes > 256 || blocks < 1)
        return fprintf(stderr, "SMB_PASSWORD, 1 to 256 processes, and a block at least\n"), 2;
    struct tally *tally =
        mmap(NULL, sizeof *tally, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (tally == MAP_FAILED)
        return perror("mmap"), 1;
    for (int i = 0; i < processes; i++)
        if (fork() == 0)
            work(tally, i, words[1], words[2], blocks, atof(words[6]));
    tally->may_preread = 0;
    for (int asked = 0; tally->ready < processes || !asked || tally->may_preread; ) {
        if (tally->ready == processes && !asked)
            asked = 1, tally->may_preread = !strcmp(words[1], "reread");
        int status;
        if (waitpid(-1, &status, WNOHANG) > 0)
            return 1;
        usleep(1000);
    }
    tally->go = 1;
    int status, failed = 0;
    while (wait(&status) > 0)
        failed |= status;
    double rate = 0;
    for (int i = 0; i < processes && !failed; i++)
        rate += tally->done[i] / tally->seconds[i];
    return failed ? 1 : (printf("%.1f\n", rate), 0);
}
