/* Replaces the file operations of the process it is preloaded into.
 *
 * The first letter of the file named by COLDRISE_TEST_SYNC controls syncs: 'f':
 * fdatasync syncs nothing and returns EIO; 'l': it syncs nothing and returns success;
 * 'w': it waits until the letter changes, and then syncs; 'p': fsync of the file or
 * folder whose path follows the letter syncs nothing and returns EIO; any other
 * letter: as usual. Every fdatasync that returns adds a byte to the file of that name
 * with ".count".
 *
 * The file named by COLDRISE_TEST_FAULTS, a struct plan, says which call below a
 * folder fails, and counts the calls there, of all processes together.
 */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum family {
  OPEN, READ, WRITE, SYNC, RENAME, UNLINK, TRUNCATE, MKDIR, LINK,
  ALLOCATE, LOCK, MAP, LIST, STAT, CLOSE, FAMILIES
};

/* The action for a call; a positive number is an errno. */
enum { SHORT = -1, KILL_BEFORE = -2, KILL_AFTER = -3 };

struct plan {
  int32_t family;
  int32_t action;
  uint64_t number;              /* The call, from 1; 0: none. */
  uint64_t counts[FAMILIES];
  char root[PATH_MAX];
};

static struct plan *plan;

__attribute__ ((constructor))
static void
load_plan (void)
{
  const char *path = getenv ("COLDRISE_TEST_FAULTS");
  int (*real) (const char *, int, ...) = dlsym (RTLD_NEXT, "open64");
  int fd;
  void *mapped;

  if (path == NULL || (fd = real (path, O_RDWR | O_CLOEXEC)) == -1)
    return;
  mapped = mmap (NULL, sizeof *plan, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (mapped != MAP_FAILED)
    plan = mapped;
  close (fd);
}

#define REAL(type, name, ...)                                   \
  static type (*real) (__VA_ARGS__);                            \
  if (real == NULL)                                             \
    real = (type (*) (__VA_ARGS__)) dlsym (RTLD_NEXT, #name)

static int
is_below (const char *path)
{
  size_t length = strlen (plan->root);

  return strncmp (path, plan->root, length) == 0 && (path[length] == '/' || path[length] == '\0');
}

/* Counts a call; returns its action, 0 for none. */
static int
turn (enum family family)
{
  uint64_t number = __atomic_add_fetch (&plan->counts[family], 1, __ATOMIC_SEQ_CST);

  if (plan->family != (int32_t) family || plan->number != number)
    return 0;
  if (plan->action == KILL_BEFORE)
    kill (getpid (), SIGKILL);
  return plan->action;
}

static int
at_path (enum family family, const char *path)
{
  return plan != NULL && is_below (path) ? turn (family) : 0;
}

static int
path_of (int fd, char path[PATH_MAX])
{
  char link[64];
  ssize_t length;

  snprintf (link, sizeof link, "/proc/self/fd/%d", fd);
  length = readlink (link, path, PATH_MAX - 1);
  if (length == -1)
    return 0;
  path[length] = '\0';
  return 1;
}

static int
at_fd (enum family family, int fd)
{
  char path[PATH_MAX];
  int saved = errno, action = 0;

  if (plan != NULL && path_of (fd, path) && is_below (path))
    action = turn (family);
  errno = saved;
  return action;
}

static int
at_entry (enum family family, int fd, const char *volatile given)
{
  const char *name = given;

  /* Rust's library calls it without a name to test whether the kernel has the call;
   * the headers promise the compiler that there is a name.
   */
  if (name == NULL)
    return 0;
  if (name[0] == '\0')
    return at_fd (family, fd);
  return name[0] == '/' || fd == AT_FDCWD ? at_path (family, name) : at_fd (family, fd);
}

static void
after (int action)
{
  if (action == KILL_AFTER)
    kill (getpid (), SIGKILL);
}

/* Makes the call, or fails. */
#define CALL(action, call)                                      \
  do {                                                          \
    __typeof__ (call) result;                                   \
    if ((action) > 0) {                                         \
      errno = (action);                                         \
      return (__typeof__ (call)) -1;                            \
    }                                                           \
    result = (call);                                            \
    after (action);                                             \
    return result;                                              \
  } while (0)

/* ---------------------------------------------------------------- opening */

static mode_t
mode_of (int flags, va_list rest)
{
  return flags & (O_CREAT | __O_TMPFILE) ? va_arg (rest, mode_t) : 0;
}

#define OPEN_CALL(name)                                         \
  int                                                           \
  name (const char *path, int flags, ...)                       \
  {                                                             \
    va_list rest;                                               \
    mode_t mode;                                                \
    int action;                                                 \
    REAL (int, name, const char *, int, ...);                   \
                                                                \
    va_start (rest, flags);                                     \
    mode = mode_of (flags, rest);                               \
    va_end (rest);                                              \
    action = at_path (OPEN, path);                              \
    CALL (action, real (path, flags, mode));                    \
  }

OPEN_CALL (open)
OPEN_CALL (open64)

#define OPENAT_CALL(name)                                       \
  int                                                           \
  name (int folder, const char *path, int flags, ...)           \
  {                                                             \
    va_list rest;                                               \
    mode_t mode;                                                \
    int action;                                                 \
    REAL (int, name, int, const char *, int, ...);              \
                                                                \
    va_start (rest, flags);                                     \
    mode = mode_of (flags, rest);                               \
    va_end (rest);                                              \
    action = at_entry (OPEN, folder, path);                     \
    CALL (action, real (folder, path, flags, mode));            \
  }

OPENAT_CALL (openat)
OPENAT_CALL (openat64)

#define FOPEN_CALL(name)                                        \
  FILE *                                                        \
  name (const char *path, const char *mode)                     \
  {                                                             \
    REAL (FILE *, name, const char *, const char *);            \
    int action = at_path (OPEN, path);                          \
    FILE *file;                                                 \
                                                                \
    if (action > 0) {                                           \
      errno = action;                                           \
      return NULL;                                              \
    }                                                           \
    file = real (path, mode);                                   \
    after (action);                                             \
    return file;                                                \
  }

FOPEN_CALL (fopen)
FOPEN_CALL (fopen64)

DIR *
opendir (const char *path)
{
  REAL (DIR *, opendir, const char *);
  int action = at_path (OPEN, path);
  DIR *folder;

  if (action > 0) {
    errno = action;
    return NULL;
  }
  folder = real (path);
  after (action);
  return folder;
}

DIR *
fdopendir (int fd)
{
  REAL (DIR *, fdopendir, int);
  int action = at_fd (OPEN, fd);
  DIR *folder;

  if (action > 0) {
    errno = action;
    return NULL;
  }
  folder = real (fd);
  after (action);
  return folder;
}

#define READDIR_CALL(name, entry)                               \
  struct entry *                                                \
  name (DIR *folder)                                            \
  {                                                             \
    REAL (struct entry *, name, DIR *);                         \
    int action = at_fd (LIST, dirfd (folder));                  \
    struct entry *found;                                        \
                                                                \
    if (action > 0) {                                           \
      errno = action;                                           \
      return NULL;                                              \
    }                                                           \
    found = real (folder);                                      \
    after (action);                                             \
    return found;                                               \
  }

READDIR_CALL (readdir, dirent)
READDIR_CALL (readdir64, dirent64)

/* A failed close still closes. It fails only for files that were written. */
int
close (int fd)
{
  REAL (int, close, int);
  int saved = errno, action = 0, flags, result;

  if (plan != NULL && (flags = fcntl (fd, F_GETFL)) != -1 && (flags & O_ACCMODE) != O_RDONLY)
    action = at_fd (CLOSE, fd);
  errno = saved;
  result = real (fd);
  after (action);
  if (action > 0) {
    errno = action;
    return -1;
  }
  return result;
}

/* ---------------------------------------------------------------- bytes */

static size_t
shortened (int action, size_t count)
{
  return action == SHORT && count > 1 ? count / 2 : count;
}

ssize_t
read (int fd, void *buffer, size_t count)
{
  REAL (ssize_t, read, int, void *, size_t);
  int action = at_fd (READ, fd);

  CALL (action, real (fd, buffer, shortened (action, count)));
}

#define PREAD_CALL(name)                                                \
  ssize_t                                                               \
  name (int fd, void *buffer, size_t count, off_t offset)               \
  {                                                                     \
    REAL (ssize_t, name, int, void *, size_t, off_t);                   \
    int action = at_fd (READ, fd);                                      \
                                                                        \
    CALL (action, real (fd, buffer, shortened (action, count), offset));\
  }

PREAD_CALL (pread)
PREAD_CALL (pread64)

#undef fread_unlocked

/* RocksDB reads its manifest and its log through streams. */
size_t
fread_unlocked (void *buffer, size_t size, size_t count, FILE *file)
{
  REAL (size_t, fread_unlocked, void *, size_t, size_t, FILE *);
  int action = at_fd (READ, fileno (file));

  if (action > 0) {
    /* The stream must report it, too: reading a folder fails. */
    int folder = open ("/", O_RDONLY);
    dup2 (folder, fileno (file));
    close (folder);
  }
  return real (buffer, size, shortened (action, count), file);
}

ssize_t
write (int fd, const void *buffer, size_t count)
{
  REAL (ssize_t, write, int, const void *, size_t);
  int action = at_fd (WRITE, fd);

  CALL (action, real (fd, buffer, shortened (action, count)));
}

#define PWRITE_CALL(name)                                               \
  ssize_t                                                               \
  name (int fd, const void *buffer, size_t count, off_t offset)         \
  {                                                                     \
    REAL (ssize_t, name, int, const void *, size_t, off_t);             \
    int action = at_fd (WRITE, fd);                                     \
                                                                        \
    CALL (action, real (fd, buffer, shortened (action, count), offset));\
  }

PWRITE_CALL (pwrite)
PWRITE_CALL (pwrite64)

/* Half of the parts; if there is only one, half of it, in `half`. */
static const struct iovec *
shortened_parts (int action, const struct iovec *parts, int *count, struct iovec *half)
{
  if (action != SHORT || *count < 1)
    return parts;
  if (*count > 1) {
    *count /= 2;
    return parts;
  }
  *half = parts[0];
  half->iov_len = shortened (action, half->iov_len);
  return half;
}

#define VECTOR_CALL(family, name)                                       \
  ssize_t                                                               \
  name (int fd, const struct iovec *parts, int count)                   \
  {                                                                     \
    REAL (ssize_t, name, int, const struct iovec *, int);               \
    int action = at_fd (family, fd);                                    \
    struct iovec half;                                                  \
                                                                        \
    parts = shortened_parts (action, parts, &count, &half);             \
    CALL (action, real (fd, parts, count));                             \
  }

VECTOR_CALL (READ, readv)
VECTOR_CALL (WRITE, writev)

#define VECTOR_AT_CALL(family, name)                                    \
  ssize_t                                                               \
  name (int fd, const struct iovec *parts, int count, off_t offset)     \
  {                                                                     \
    REAL (ssize_t, name, int, const struct iovec *, int, off_t);        \
    int action = at_fd (family, fd);                                    \
    struct iovec half;                                                  \
                                                                        \
    parts = shortened_parts (action, parts, &count, &half);             \
    CALL (action, real (fd, parts, count, offset));                     \
  }

VECTOR_AT_CALL (READ, preadv)
VECTOR_AT_CALL (READ, preadv64)
VECTOR_AT_CALL (WRITE, pwritev)
VECTOR_AT_CALL (WRITE, pwritev64)

#define VECTOR_FLAGS_CALL(family, name)                                 \
  ssize_t                                                               \
  name (int fd, const struct iovec *parts, int count, off_t offset, int flags) \
  {                                                                     \
    REAL (ssize_t, name, int, const struct iovec *, int, off_t, int);   \
    int action = at_fd (family, fd);                                    \
    struct iovec half;                                                  \
                                                                        \
    parts = shortened_parts (action, parts, &count, &half);             \
    CALL (action, real (fd, parts, count, offset, flags));              \
  }

VECTOR_FLAGS_CALL (READ, preadv2)
VECTOR_FLAGS_CALL (READ, preadv64v2)
VECTOR_FLAGS_CALL (WRITE, pwritev2)
VECTOR_FLAGS_CALL (WRITE, pwritev64v2)

/* A copy by the kernel counts where it writes, or else where it reads. */
static int
at_copy (int from, int to)
{
  int action = at_fd (WRITE, to);

  return action != 0 ? action : at_fd (READ, from);
}

ssize_t
copy_file_range (int from, off64_t *from_offset, int to, off64_t *to_offset, size_t count,
                 unsigned int flags)
{
  REAL (ssize_t, copy_file_range, int, off64_t *, int, off64_t *, size_t, unsigned int);
  int action = at_copy (from, to);

  CALL (action, real (from, from_offset, to, to_offset, shortened (action, count), flags));
}

#define SENDFILE_CALL(name)                                             \
  ssize_t                                                               \
  name (int to, int from, off_t *offset, size_t count)                  \
  {                                                                     \
    REAL (ssize_t, name, int, int, off_t *, size_t);                    \
    int action = at_copy (from, to);                                    \
                                                                        \
    CALL (action, real (to, from, offset, shortened (action, count)));  \
  }

SENDFILE_CALL (sendfile)
SENDFILE_CALL (sendfile64)

ssize_t
splice (int from, off64_t *from_offset, int to, off64_t *to_offset, size_t count,
        unsigned int flags)
{
  REAL (ssize_t, splice, int, off64_t *, int, off64_t *, size_t, unsigned int);
  int action = at_copy (from, to);

  CALL (action, real (from, from_offset, to, to_offset, shortened (action, count), flags));
}

#define MMAP_CALL(name)                                                 \
  void *                                                                \
  name (void *place, size_t length, int protection, int flags, int fd, off_t offset) \
  {                                                                     \
    REAL (void *, name, void *, size_t, int, int, int, off_t);          \
    int action = fd == -1 ? 0 : at_fd (MAP, fd);                        \
                                                                        \
    CALL (action, real (place, length, protection, flags, fd, offset)); \
  }

MMAP_CALL (mmap)
MMAP_CALL (mmap64)

/* ---------------------------------------------------------------- syncs */

/* Returns the letter; `rest` gets the text behind it. */
static char
order (char rest[PATH_MAX])
{
  REAL (ssize_t, read, int, void *, size_t);
  const char *path = getenv ("COLDRISE_TEST_SYNC");
  char letter = 'o';
  ssize_t length;
  int fd;

  rest[0] = '\0';
  if (path == NULL || (fd = open (path, O_RDONLY | O_CLOEXEC)) == -1)
    return letter;
  if (real (fd, &letter, 1) != 1)
    letter = 'o';
  length = real (fd, rest, PATH_MAX - 1);
  rest[length > 0 ? length : 0] = '\0';
  close (fd);
  return letter;
}

static int
is_at (int fd, const char *path)
{
  char found[PATH_MAX];

  return path_of (fd, found) && strcmp (found, path) == 0;
}

static void
count_sync (void)
{
  REAL (ssize_t, write, int, const void *, size_t);
  const char *path = getenv ("COLDRISE_TEST_SYNC");
  char counted[PATH_MAX];
  int fd;

  if (path == NULL)
    return;
  snprintf (counted, sizeof counted, "%s.count", path);
  fd = open (counted, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (fd == -1)
    return;
  if (real (fd, ".", 1) != 1)
    perror (counted);
  close (fd);
}

static int
counted_fdatasync (int fd)
{
  REAL (int, fdatasync, int);
  int result = real (fd);

  count_sync ();
  return result;
}

int
fdatasync (int fd)
{
  char rest[PATH_MAX];
  char letter;
  int action = at_fd (SYNC, fd);

  while ((letter = order (rest)) == 'w')
    usleep (1000);
  switch (letter) {
  case 'f':
    errno = EIO;
    return -1;
  case 'l':
    return 0;
  default:
    CALL (action, counted_fdatasync (fd));
  }
}

int
fsync (int fd)
{
  REAL (int, fsync, int);
  char rest[PATH_MAX];
  int action = at_fd (SYNC, fd);

  if (order (rest) == 'p' && is_at (fd, rest)) {
    errno = EIO;
    return -1;
  }
  CALL (action, real (fd));
}

int
sync_file_range (int fd, off_t offset, off_t count, unsigned int flags)
{
  REAL (int, sync_file_range, int, off_t, off_t, unsigned int);
  /* Without flags it only tests whether the call exists. */
  int action = flags == 0 ? 0 : at_fd (SYNC, fd);

  CALL (action, real (fd, offset, count, flags));
}

/* ---------------------------------------------------------------- names and sizes */

int
rename (const char *from, const char *to)
{
  REAL (int, rename, const char *, const char *);
  int action = at_path (RENAME, to);

  CALL (action, real (from, to));
}

int
renameat (int from_folder, const char *from, int to_folder, const char *to)
{
  REAL (int, renameat, int, const char *, int, const char *);
  int action = at_entry (RENAME, to_folder, to);

  CALL (action, real (from_folder, from, to_folder, to));
}

int
renameat2 (int from_folder, const char *from, int to_folder, const char *to, unsigned int flags)
{
  REAL (int, renameat2, int, const char *, int, const char *, unsigned int);
  int action = at_entry (RENAME, to_folder, to);

  CALL (action, real (from_folder, from, to_folder, to, flags));
}

int
unlink (const char *path)
{
  REAL (int, unlink, const char *);
  int action = at_path (UNLINK, path);

  CALL (action, real (path));
}

int
unlinkat (int folder, const char *path, int flags)
{
  REAL (int, unlinkat, int, const char *, int);
  int action = at_entry (UNLINK, folder, path);

  CALL (action, real (folder, path, flags));
}

int
rmdir (const char *path)
{
  REAL (int, rmdir, const char *);
  int action = at_path (UNLINK, path);

  CALL (action, real (path));
}

#define TRUNCATE_CALL(name)                             \
  int                                                   \
  name (int fd, off_t length)                           \
  {                                                     \
    REAL (int, name, int, off_t);                       \
    int action = at_fd (TRUNCATE, fd);                  \
                                                        \
    CALL (action, real (fd, length));                   \
  }

TRUNCATE_CALL (ftruncate)
TRUNCATE_CALL (ftruncate64)

#define FALLOCATE_CALL(name)                                    \
  int                                                           \
  name (int fd, int mode, off_t offset, off_t length)           \
  {                                                             \
    REAL (int, name, int, int, off_t, off_t);                   \
    int action = at_fd (ALLOCATE, fd);                          \
                                                                \
    CALL (action, real (fd, mode, offset, length));             \
  }

FALLOCATE_CALL (fallocate)
FALLOCATE_CALL (fallocate64)

/* These return the errno. */
#define POSIX_FALLOCATE_CALL(name)                              \
  int                                                           \
  name (int fd, off_t offset, off_t length)                     \
  {                                                             \
    REAL (int, name, int, off_t, off_t);                        \
    int action = at_fd (ALLOCATE, fd);                          \
    int result = action > 0 ? action : real (fd, offset, length); \
                                                                \
    after (action);                                             \
    return result;                                              \
  }

POSIX_FALLOCATE_CALL (posix_fallocate)
POSIX_FALLOCATE_CALL (posix_fallocate64)

int
mkdir (const char *path, mode_t mode)
{
  REAL (int, mkdir, const char *, mode_t);
  int action = at_path (MKDIR, path);

  CALL (action, real (path, mode));
}

int
mkdirat (int folder, const char *path, mode_t mode)
{
  REAL (int, mkdirat, int, const char *, mode_t);
  int action = at_entry (MKDIR, folder, path);

  CALL (action, real (folder, path, mode));
}

int
link (const char *from, const char *to)
{
  REAL (int, link, const char *, const char *);
  int action = at_path (LINK, to);

  CALL (action, real (from, to));
}

int
linkat (int from_folder, const char *from, int to_folder, const char *to, int flags)
{
  REAL (int, linkat, int, const char *, int, const char *, int);
  int action = at_entry (LINK, to_folder, to);

  CALL (action, real (from_folder, from, to_folder, to, flags));
}

/* ---------------------------------------------------------------- locks */

int
flock (int fd, int operation)
{
  REAL (int, flock, int, int);
  int action = at_fd (LOCK, fd);

  CALL (action, real (fd, operation));
}

/* The argument is a number or an address: both use the same register. */
#define FCNTL_CALL(name)                                        \
  int                                                           \
  name (int fd, int command, ...)                               \
  {                                                             \
    va_list rest;                                               \
    void *argument;                                             \
    int action = 0;                                             \
    REAL (int, name, int, int, ...);                            \
                                                                \
    va_start (rest, command);                                   \
    argument = va_arg (rest, void *);                           \
    va_end (rest);                                              \
    switch (command) {                                          \
    case F_SETLK:                                               \
    case F_SETLKW:                                              \
    case F_OFD_SETLK:                                           \
    case F_OFD_SETLKW:                                          \
      action = at_fd (LOCK, fd);                                \
    }                                                           \
    CALL (action, real (fd, command, argument));                \
  }

FCNTL_CALL (fcntl)
FCNTL_CALL (fcntl64)

/* ---------------------------------------------------------------- questions */

#define STAT_CALL(name, answer)                                 \
  int                                                           \
  name (const char *path, struct answer *found)                 \
  {                                                             \
    REAL (int, name, const char *, struct answer *);            \
    int action = at_path (STAT, path);                          \
                                                                \
    CALL (action, real (path, found));                          \
  }

STAT_CALL (stat, stat)
STAT_CALL (stat64, stat64)
STAT_CALL (lstat, stat)
STAT_CALL (lstat64, stat64)

#define FSTAT_CALL(name, answer)                                \
  int                                                           \
  name (int fd, struct answer *found)                           \
  {                                                             \
    REAL (int, name, int, struct answer *);                     \
    int action = at_fd (STAT, fd);                              \
                                                                \
    CALL (action, real (fd, found));                            \
  }

FSTAT_CALL (fstat, stat)
FSTAT_CALL (fstat64, stat64)

#define FSTATAT_CALL(name, answer)                              \
  int                                                           \
  name (int folder, const char *path, struct answer *found, int flags) \
  {                                                             \
    REAL (int, name, int, const char *, struct answer *, int);  \
    int action = at_entry (STAT, folder, path);                 \
                                                                \
    CALL (action, real (folder, path, found, flags));           \
  }

FSTATAT_CALL (fstatat, stat)
FSTATAT_CALL (fstatat64, stat64)

int
statx (int folder, const char *path, int flags, unsigned int mask, struct statx *found)
{
  REAL (int, statx, int, const char *, int, unsigned int, struct statx *);
  int action = at_entry (STAT, folder, path);

  CALL (action, real (folder, path, flags, mask, found));
}

int
access (const char *path, int mode)
{
  REAL (int, access, const char *, int);
  int action = at_path (STAT, path);

  CALL (action, real (path, mode));
}

/* nfs-ganesha makes its plugins look for functions in the C library first. */
void *
dlopen (const char *path, int flags)
{
  REAL (void *, dlopen, const char *, int);

  return real (path, flags & ~RTLD_DEEPBIND);
}
