/* An nbdkit plugin that serves raw files and encrypts what is written into them: the least work of a server whose
 * captured writes are encrypted. It keeps no records and no map; nonces and tags are in memory only.
 *
 *     nbdkit --foreground ./encrypting_file.so file=FILE
 *     nbdkit --foreground ./encrypting_file.so dir=FOLDER      (an export's name is its file's)
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
static int is_folder;
static pthread_key_t buffers;
static atomic_uint_fast64_t nonces = 1;

/* One file. All connections to it share it, and it stays until the server ends. */
struct disk {
    struct disk *next;
    char *name;
    int file;
    int64_t size;
    struct seal *seals;
    pthread_rwlock_t *regions;
};

static struct disk *disks;
static pthread_mutex_t disks_lock = PTHREAD_MUTEX_INITIALIZER;

static int config(const char *name, const char *value)
{
    is_folder = !strcmp(name, "dir");
    if (!is_folder && strcmp(name, "file")) {
        nbdkit_error("unknown parameter %s", name);
        return -1;
    }
    free(path);
    path = nbdkit_realpath(value);
    return path ? 0 : -1;
}

static int get_ready(void)
{
    cipher = PREFIXED(EVP_AEAD_CTX_new)(PREFIXED(EVP_aead_aes_256_gcm)(), key, sizeof key, TAG);
    if (!path || !cipher || pthread_key_create(&buffers, free)) {
        nbdkit_error(path ? "no memory" : "file=FILE or dir=FOLDER is needed");
        return -1;
    }
    return 0;
}

static struct disk *new_disk(const char *name)
{
    struct stat about;
    struct disk *disk = calloc(1, sizeof *disk);
    int folder = is_folder ? open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : AT_FDCWD;
    if (!disk || !(disk->name = strdup(name)))
        return NULL;
    disk->file = openat(folder, is_folder ? name : path, O_RDWR | O_CLOEXEC);
    if (disk->file < 0 || fstat(disk->file, &about)) {
        nbdkit_error("%s, %s: %m", path, name);
        return NULL;
    }
    disk->size = about.st_size / BLOCK * BLOCK;
    size_t count = disk->size / REGION + 1;
    disk->seals = calloc(disk->size / BLOCK + 1, sizeof *disk->seals);
    disk->regions = calloc(count, sizeof *disk->regions);
    if (!disk->seals || !disk->regions) {
        nbdkit_error("no memory");
        return NULL;
    }
    for (size_t region = 0; region < count; region++)
        pthread_rwlock_init(&disk->regions[region], NULL);
    return disk;
}

static void *open_export(int readonly)
{
    (void)readonly;
    const char *name = is_folder ? nbdkit_export_name() : "";
    struct disk *disk;
    pthread_mutex_lock(&disks_lock);
    for (disk = disks; disk && strcmp(disk->name, name); disk = disk->next)
        ;
    if (!disk && (disk = new_disk(name))) {
        disk->next = disks;
        disks = disk;
    }
    pthread_mutex_unlock(&disks_lock);
    return disk;
}

static int64_t get_size(void *handle)
{
    return ((struct disk *)handle)->size;
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
static uint8_t *begin(struct disk *disk, uint32_t count, uint64_t offset, int (*lock)(pthread_rwlock_t *))
{
    uint8_t *buffer = pthread_getspecific(buffers);
    if (!buffer && (buffer = malloc(MAX_REQUEST)))
        pthread_setspecific(buffers, buffer);
    if (!buffer || count == 0 || count % BLOCK || offset % BLOCK || count > MAX_REQUEST) {
        nbdkit_set_error(buffer ? EINVAL : ENOMEM);
        return NULL;
    }
    for (uint64_t region = offset / REGION; region <= (offset + count - 1) / REGION; region++)
        lock(&disk->regions[region]);
    return buffer;
}

static int end(struct disk *disk, uint32_t count, uint64_t offset, int is_done)
{
    for (uint64_t region = offset / REGION; region <= (offset + count - 1) / REGION; region++)
        pthread_rwlock_unlock(&disk->regions[region]);
    if (is_done)
        return 0;
    nbdkit_error("a request at %lu failed", (unsigned long)offset);
    nbdkit_set_error(EIO);
    return -1;
}

static int write_blocks(void *handle, const void *content, uint32_t count, uint64_t offset, uint32_t flags)
{
    struct disk *disk = handle;
    (void)flags;
    uint8_t *buffer = begin(disk, count, offset, pthread_rwlock_wrlock);
    if (!buffer)
        return -1;
    uint64_t nonce = atomic_fetch_add(&nonces, count / BLOCK);
    int is_done = 1;
    for (uint32_t at = 0; is_done && at < count; at += BLOCK) {
        struct seal *seal = &disk->seals[(offset + at) / BLOCK];
        uint8_t iv[NONCE] = {0};
        size_t tag_bytes;
        seal->nonce = nonce++;
        memcpy(iv, &seal->nonce, sizeof seal->nonce);
        is_done = PREFIXED(EVP_AEAD_CTX_seal_scatter)(cipher, buffer + at, seal->tag, &tag_bytes, TAG, iv, NONCE,
            (const uint8_t *)content + at, BLOCK, NULL, 0, NULL, 0);
    }
    is_done = is_done && pwrite(disk->file, buffer, count, offset) == (ssize_t)count;
    return end(disk, count, offset, is_done);
}

static int read_blocks(void *handle, void *content, uint32_t count, uint64_t offset, uint32_t flags)
{
    struct disk *disk = handle;
    (void)flags;
    uint8_t *buffer = begin(disk, count, offset, pthread_rwlock_rdlock);
    if (!buffer)
        return -1;
    int is_done = pread(disk->file, buffer, count, offset) == (ssize_t)count;
    for (uint32_t at = 0; is_done && at < count; at += BLOCK) {
        struct seal *seal = &disk->seals[(offset + at) / BLOCK];
        uint8_t iv[NONCE] = {0}, *plain = (uint8_t *)content + at;
        memcpy(iv, &seal->nonce, sizeof seal->nonce);
        if (seal->nonce)
            is_done = PREFIXED(EVP_AEAD_CTX_open_gather)(
                cipher, plain, iv, NONCE, buffer + at, BLOCK, seal->tag, TAG, NULL, 0);
        else
            memcpy(plain, buffer + at, BLOCK);
    }
    return end(disk, count, offset, is_done);
}

static int flush(void *handle, uint32_t flags)
{
    (void)flags;
    return fdatasync(((struct disk *)handle)->file);
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
