/* An nbdkit plugin that serves a raw file and encrypts what is written into it: the least work of a server whose
 * captured writes are encrypted. It keeps no records and no map; nonces and tags are in memory only.
 *
 *     nbdkit --foreground ./encrypting_file.so file=FILE
 *
 * A block that was not written since the start is read as it is in the file. The cipher is the one that Coldrise is
 * linked with, AWS-LC; PREFIXED adds the prefix that its symbols have there. */

#define NBDKIT_API_VERSION 2
#include <nbdkit-plugin.h>

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define THREAD_MODEL NBDKIT_THREAD_MODEL_PARALLEL
#define BLOCK 4096
#define TAG 16
#define NONCE 12
/* A lock covers so many bytes: a block's nonce, tag and content change together. */
#define REGION (256 << 10)
#define MAX_REQUEST (32 << 20)

struct seal {
    uint64_t nonce; /* 0: not written */
    uint8_t tag[TAG];
};

/* As in openssl/aead.h of AWS-LC. */
const void *PREFIXED(EVP_aead_aes_256_gcm)(void);
void *PREFIXED(EVP_AEAD_CTX_new)(const void *aead, const uint8_t *key, size_t key_len, size_t tag_len);
int PREFIXED(EVP_AEAD_CTX_seal_scatter)(const void *ctx, uint8_t *out, uint8_t *out_tag, size_t *out_tag_len,
    size_t max_out_tag_len, const uint8_t *nonce, size_t nonce_len, const uint8_t *in, size_t in_len,
    const uint8_t *extra_in, size_t extra_in_len, const uint8_t *ad, size_t ad_len);
int PREFIXED(EVP_AEAD_CTX_open_gather)(const void *ctx, uint8_t *out, const uint8_t *nonce, size_t nonce_len,
    const uint8_t *in, size_t in_len, const uint8_t *in_tag, size_t in_tag_len, const uint8_t *ad, size_t ad_len);

static const uint8_t key[32] = {7};
/* Threads share it: only its setup changes it. */
static const void *cipher;
static char *path;
static int file = -1;
static int64_t size;
static struct seal *seals;
static pthread_rwlock_t *regions;
static pthread_key_t buffers;
static atomic_uint_fast64_t nonces = 1;

static int config(const char *name, const char *value)
{
    if (strcmp(name, "file")) {
        nbdkit_error("unknown parameter %s", name);
        return -1;
    }
    free(path);
    path = nbdkit_realpath(value);
    return path ? 0 : -1;
}

static int get_ready(void)
{
    struct stat about;
    file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (file < 0 || fstat(file, &about)) {
        nbdkit_error("file=%s: %m", path ? path : "");
        return -1;
    }
    size = about.st_size / BLOCK * BLOCK;
    size_t count = size / REGION + 1;
    seals = calloc(size / BLOCK + 1, sizeof *seals);
    regions = calloc(count, sizeof *regions);
    cipher = PREFIXED(EVP_AEAD_CTX_new)(PREFIXED(EVP_aead_aes_256_gcm)(), key, sizeof key, TAG);
    if (!seals || !regions || !cipher || pthread_key_create(&buffers, free)) {
        nbdkit_error("no memory");
        return -1;
    }
    for (size_t region = 0; region < count; region++)
        pthread_rwlock_init(&regions[region], NULL);
    return 0;
}

static void *open_export(int readonly)
{
    (void)readonly;
    return NBDKIT_HANDLE_NOT_NEEDED;
}

static int64_t get_size(void *handle)
{
    (void)handle;
    return size;
}

static int can_multi_conn(void *handle)
{
    (void)handle;
    return 1;
}

static int block_size(void *handle, uint32_t *minimum, uint32_t *preferred, uint32_t *maximum)
{
    (void)handle;
    *minimum = *preferred = BLOCK;
    *maximum = MAX_REQUEST;
    return 0;
}

/* Locks the blocks of a request. Returns the thread's buffer. */
static uint8_t *begin(uint32_t count, uint64_t offset, int (*lock)(pthread_rwlock_t *))
{
    uint8_t *buffer = pthread_getspecific(buffers);
    if (!buffer && (buffer = malloc(MAX_REQUEST)))
        pthread_setspecific(buffers, buffer);
    if (!buffer || count == 0 || count % BLOCK || offset % BLOCK || count > MAX_REQUEST) {
        nbdkit_set_error(buffer ? EINVAL : ENOMEM);
        return NULL;
    }
    for (uint64_t region = offset / REGION; region <= (offset + count - 1) / REGION; region++)
        lock(&regions[region]);
    return buffer;
}

static int end(uint32_t count, uint64_t offset, int is_done)
{
    for (uint64_t region = offset / REGION; region <= (offset + count - 1) / REGION; region++)
        pthread_rwlock_unlock(&regions[region]);
    if (is_done)
        return 0;
    nbdkit_error("a request at %lu failed", (unsigned long)offset);
    nbdkit_set_error(EIO);
    return -1;
}

static int write_blocks(void *handle, const void *content, uint32_t count, uint64_t offset, uint32_t flags)
{
    (void)handle;
    (void)flags;
    uint8_t *buffer = begin(count, offset, pthread_rwlock_wrlock);
    if (!buffer)
        return -1;
    uint64_t nonce = atomic_fetch_add(&nonces, count / BLOCK);
    int is_done = 1;
    for (uint32_t at = 0; is_done && at < count; at += BLOCK) {
        struct seal *seal = &seals[(offset + at) / BLOCK];
        uint8_t iv[NONCE] = {0};
        size_t tag_bytes;
        seal->nonce = nonce++;
        memcpy(iv, &seal->nonce, sizeof seal->nonce);
        is_done = PREFIXED(EVP_AEAD_CTX_seal_scatter)(cipher, buffer + at, seal->tag, &tag_bytes, TAG, iv, NONCE,
            (const uint8_t *)content + at, BLOCK, NULL, 0, NULL, 0);
    }
    is_done = is_done && pwrite(file, buffer, count, offset) == (ssize_t)count;
    return end(count, offset, is_done);
}

static int read_blocks(void *handle, void *content, uint32_t count, uint64_t offset, uint32_t flags)
{
    (void)handle;
    (void)flags;
    uint8_t *buffer = begin(count, offset, pthread_rwlock_rdlock);
    if (!buffer)
        return -1;
    int is_done = pread(file, buffer, count, offset) == (ssize_t)count;
    for (uint32_t at = 0; is_done && at < count; at += BLOCK) {
        struct seal *seal = &seals[(offset + at) / BLOCK];
        uint8_t iv[NONCE] = {0}, *plain = (uint8_t *)content + at;
        memcpy(iv, &seal->nonce, sizeof seal->nonce);
        if (seal->nonce)
            is_done = PREFIXED(EVP_AEAD_CTX_open_gather)(
                cipher, plain, iv, NONCE, buffer + at, BLOCK, seal->tag, TAG, NULL, 0);
        else
            memcpy(plain, buffer + at, BLOCK);
    }
    return end(count, offset, is_done);
}

static int flush(void *handle, uint32_t flags)
{
    (void)handle;
    (void)flags;
    return fdatasync(file);
}

static struct nbdkit_plugin plugin = {
    .name = "encrypting-file",
    .config = config,
    .get_ready = get_ready,
    .open = open_export,
    .get_size = get_size,
    .can_multi_conn = can_multi_conn,
    .block_size = block_size,
    .pread = read_blocks,
    .pwrite = write_blocks,
    .flush = flush,
    .errno_is_preserved = 1,
};

NBDKIT_REGISTER_PLUGIN(plugin)
