/* Replaces the file operations of the process it is preloaded into.
 *
 * The first letter of the file named by COLDRISE_TEST_SYNC controls syncs: 'f':
 * fdatasync syncs nothing and returns EIO, and _exit takes half a second; 'l': it syncs nothing and returns success;
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

#define REAL(type, name, parameters)                            \
  static type (*real) parameters;                               \
  if (real == NULL)                                             \
    real = (type (*) parameters) dlsym (RTLD_NEXT, #name)

/* Makes the call, or fails: the end of a function that has an `action`. */
#define CALL(failed, call)                                      \
  do {                                                          \
    __typeof__ (call) result;                                   \
    if (action > 0) {                                           \
      errno = action;                                           \
      return failed;                                            \
    }                                                           \
    result = (call);                                            \
    after (action);                                             \
    return result;                                              \
  } while (0)

/* Defines a function of the C library that fails with `failed` and an errno, if `call`, which counts
 * it, returns an errno. `arguments`, for the library's own function, may depend on `action`.
 */
#define FAULTY_OR(failed, type, name, parameters, call, arguments) \
  type                                                          \
  name parameters                                               \
  {                                                             \
    REAL (type, name, parameters);                              \
    int action = call;                                          \
                                                                \
    CALL (failed, real arguments);                              \
  }

#define FAULTY(type, name, parameters, call, arguments)         \
  FAULTY_OR ((type) -1, type, name, parameters, call, arguments)

/* ---------------------------------------------------------------- opening */

static mode_t
mode_of (int flags, va_list rest)
{
  return flags & (O_CREAT | __O_TMPFILE) ? va_arg (rest, mode_t) : 0;
}

#define OPEN_CALL(name, parameters, types, call, arguments)     \
  int                                                           \
  name parameters                                               \
  {                                                             \
    va_list rest;                                               \
    mode_t mode;                                                \
    int action;                                                 \
    REAL (int, name, types);                                    \
                                                                \
    va_start (rest, flags);                                     \
    mode = mode_of (flags, rest);                               \
    va_end (rest);                                              \
    action = call;                                              \
    CALL (-1, real arguments);                                  \
  }

#define OPEN_AT_PATH(name)                                      \
  OPEN_CALL (name, (const char *path, int flags, ...), (const char *, int, ...), \
             at_path (OPEN, path), (path, flags, mode))
#define OPEN_AT_ENTRY(name)                                     \
  OPEN_CALL (name, (int folder, const char *path, int flags, ...), (int, const char *, int, ...), \
             at_entry (OPEN, folder, path), (folder, path, flags, mode))

OPEN_AT_PATH (open)
OPEN_AT_PATH (open64)
OPEN_AT_ENTRY (openat)
OPEN_AT_ENTRY (openat64)

#define FOPEN(name)                                             \
  FAULTY_OR (NULL, FILE *, name, (const char *path, const char *mode), at_path (OPEN, path), (path, mode))

FOPEN (fopen)
FOPEN (fopen64)

FAULTY_OR (NULL, DIR *, opendir, (const char *path), at_path (OPEN, path), (path))
FAULTY_OR (NULL, DIR *, fdopendir, (int fd), at_fd (OPEN, fd), (fd))

#define READDIR(name, entry)                                    \
  FAULTY_OR (NULL, struct entry *, name, (DIR *folder), at_fd (LIST, dirfd (folder)), (folder))

READDIR (readdir, dirent)
READDIR (readdir64, dirent64)

/* A failed close still closes. It fails only for files that were written. */
int
close (int fd)
{
  REAL (int, close, (int));
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

/* Half of the parts; if there is only one, half of it, in `half`. */
static const struct iovec *
shortened_parts (int action, const struct iovec *parts, int count, struct iovec *half)
{
  if (action != SHORT || count != 1)
    return parts;
  *half = parts[0];
  half->iov_len = shortened (action, half->iov_len);
  return half;
}

#define BYTES (fd, buffer, shortened (action, count))
#define BYTES_AT (fd, buffer, shortened (action, count), offset)

FAULTY (ssize_t, read, (int fd, void *buffer, size_t count), at_fd (READ, fd), BYTES)
FAULTY (ssize_t, write, (int fd, const void *buffer, size_t count), at_fd (WRITE, fd), BYTES)
FAULTY (ssize_t, pread, (int fd, void *buffer, size_t count, off_t offset), at_fd (READ, fd), BYTES_AT)
FAULTY (ssize_t, pread64, (int fd, void *buffer, size_t count, off_t offset), at_fd (READ, fd), BYTES_AT)
FAULTY (ssize_t, pwrite, (int fd, const void *buffer, size_t count, off_t offset), at_fd (WRITE, fd), BYTES_AT)
FAULTY (ssize_t, pwrite64, (int fd, const void *buffer, size_t count, off_t offset), at_fd (WRITE, fd), BYTES_AT)

#undef fread_unlocked

/* RocksDB reads its manifest and its log through streams. */
size_t
fread_unlocked (void *buffer, size_t size, size_t count, FILE *file)
{
  REAL (size_t, fread_unlocked, (void *, size_t, size_t, FILE *));
  int action = at_fd (READ, fileno (file));

  if (action > 0) {
    /* The stream must report it, too: reading a folder fails. */
    int folder = open ("/", O_RDONLY);
    dup2 (folder, fileno (file));
    close (folder);
  }
  return real (buffer, size, shortened (action, count), file);
}

#define PARTS                                                   \
  fd, shortened_parts (action, parts, count, &(struct iovec) { 0 }), (int) shortened (action, count)
#define VECTOR(family, name)                                    \
  FAULTY (ssize_t, name, (int fd, const struct iovec *parts, int count), at_fd (family, fd), (PARTS))
#define VECTOR_AT(family, name)                                 \
  FAULTY (ssize_t, name, (int fd, const struct iovec *parts, int count, off_t offset), \
          at_fd (family, fd), (PARTS, offset))
#define VECTOR_FLAGS(family, name)                              \
  FAULTY (ssize_t, name, (int fd, const struct iovec *parts, int count, off_t offset, int flags), \
          at_fd (family, fd), (PARTS, offset, flags))

VECTOR (READ, readv)
VECTOR (WRITE, writev)
VECTOR_AT (READ, preadv)
VECTOR_AT (READ, preadv64)
VECTOR_AT (WRITE, pwritev)
VECTOR_AT (WRITE, pwritev64)
VECTOR_FLAGS (READ, preadv2)
VECTOR_FLAGS (READ, preadv64v2)
VECTOR_FLAGS (WRITE, pwritev2)
VECTOR_FLAGS (WRITE, pwritev64v2)

/* A copy by the kernel counts where it writes, or else where it reads. */
static int
at_copy (int from, int to)
{
  int action = at_fd (WRITE, to);

  return action != 0 ? action : at_fd (READ, from);
}

#define COPY (from, from_offset, to, to_offset, shortened (action, count), flags)
#define SENDFILE(name)                                          \
  FAULTY (ssize_t, name, (int to, int from, off_t *offset, size_t count), at_copy (from, to), \
          (to, from, offset, shortened (action, count)))

FAULTY (ssize_t, copy_file_range,
        (int from, off64_t *from_offset, int to, off64_t *to_offset, size_t count, unsigned int flags),
        at_copy (from, to), COPY)
FAULTY (ssize_t, splice,
        (int from, off64_t *from_offset, int to, off64_t *to_offset, size_t count, unsigned int flags),
        at_copy (from, to), COPY)
SENDFILE (sendfile)
SENDFILE (sendfile64)

#define MMAP(name)                                              \
  FAULTY (void *, name, (void *place, size_t length, int protection, int flags, int fd, off_t offset), \
          fd == -1 ? 0 : at_fd (MAP, fd), (place, length, protection, flags, fd, offset))

MMAP (mmap)
MMAP (mmap64)

/* ---------------------------------------------------------------- syncs */

/* Returns the letter; `rest` gets the text behind it. */
static char
order (char rest[PATH_MAX])
{
  REAL (ssize_t, read, (int, void *, size_t));
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
  REAL (ssize_t, write, (int, const void *, size_t));
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
  REAL (int, fdatasync, (int));
  int result = real (fd);

  count_sync ();
  return result;
}

int
fdatasync (int fd)
{
  char rest[PATH_MAX];
  char letter;
  int action = at_fd (SYNC, fd), result;

  while ((letter = order (rest)) == 'w')
    usleep (1000);
  if (letter == 'l')
    return 0;
  if (letter == 'f' || action > 0) {
    errno = letter == 'f' ? EIO : action;
    return -1;
  }
  result = counted_fdatasync (fd);
  after (action);
  return result;
}

/* After a failed sync, others have half a second for their calls. */
void
_exit (int status)
{
  REAL (void, _exit, (int));
  char rest[PATH_MAX];

  if (order (rest) == 'f')
    usleep (500 * 1000);
  real (status);
  __builtin_unreachable ();
}

/* The errno for an fsync: of the letter, or else of the plan. */
static int
at_fsync (int fd)
{
  char rest[PATH_MAX];
  int action = at_fd (SYNC, fd);

  return order (rest) == 'p' && is_at (fd, rest) ? EIO : action;
}

FAULTY (int, fsync, (int fd), at_fsync (fd), (fd))

/* Without flags it only tests whether the call exists. */
FAULTY (int, sync_file_range, (int fd, off_t offset, off_t count, unsigned int flags),
        flags == 0 ? 0 : at_fd (SYNC, fd), (fd, offset, count, flags))

/* ---------------------------------------------------------------- names and sizes */

FAULTY (int, rename, (const char *from, const char *to), at_path (RENAME, to), (from, to))
FAULTY (int, renameat, (int from_folder, const char *from, int to_folder, const char *to),
        at_entry (RENAME, to_folder, to), (from_folder, from, to_folder, to))
FAULTY (int, renameat2, (int from_folder, const char *from, int to_folder, const char *to, unsigned int flags),
        at_entry (RENAME, to_folder, to), (from_folder, from, to_folder, to, flags))
FAULTY (int, unlink, (const char *path), at_path (UNLINK, path), (path))
FAULTY (int, unlinkat, (int folder, const char *path, int flags), at_entry (UNLINK, folder, path),
        (folder, path, flags))
FAULTY (int, rmdir, (const char *path), at_path (UNLINK, path), (path))
FAULTY (int, mkdir, (const char *path, mode_t mode), at_path (MKDIR, path), (path, mode))
FAULTY (int, mkdirat, (int folder, const char *path, mode_t mode), at_entry (MKDIR, folder, path),
        (folder, path, mode))
FAULTY (int, link, (const char *from, const char *to), at_path (LINK, to), (from, to))
FAULTY (int, linkat, (int from_folder, const char *from, int to_folder, const char *to, int flags),
        at_entry (LINK, to_folder, to), (from_folder, from, to_folder, to, flags))
FAULTY (int, ftruncate, (int fd, off_t length), at_fd (TRUNCATE, fd), (fd, length))
FAULTY (int, ftruncate64, (int fd, off_t length), at_fd (TRUNCATE, fd), (fd, length))
FAULTY (int, fallocate, (int fd, int mode, off_t offset, off_t length), at_fd (ALLOCATE, fd),
        (fd, mode, offset, length))
FAULTY (int, fallocate64, (int fd, int mode, off_t offset, off_t length), at_fd (ALLOCATE, fd),
        (fd, mode, offset, length))

/* These return the errno. */
FAULTY_OR (action, int, posix_fallocate, (int fd, off_t offset, off_t length), at_fd (ALLOCATE, fd),
           (fd, offset, length))
FAULTY_OR (action, int, posix_fallocate64, (int fd, off_t offset, off_t length), at_fd (ALLOCATE, fd),
           (fd, offset, length))

/* ---------------------------------------------------------------- locks */

FAULTY (int, flock, (int fd, int operation), at_fd (LOCK, fd), (fd, operation))

static int
is_lock (int command)
{
  return command == F_SETLK || command == F_SETLKW || command == F_OFD_SETLK || command == F_OFD_SETLKW;
}

/* The argument is a number or an address: both use the same register. */
#define FCNTL(name)                                             \
  int                                                           \
  name (int fd, int command, ...)                               \
  {                                                             \
    va_list rest;                                               \
    void *argument;                                             \
    int action;                                                 \
    REAL (int, name, (int, int, ...));                          \
                                                                \
    va_start (rest, command);                                   \
    argument = va_arg (rest, void *);                           \
    va_end (rest);                                              \
    action = is_lock (command) ? at_fd (LOCK, fd) : 0;          \
    CALL (-1, real (fd, command, argument));                    \
  }

FCNTL (fcntl)
FCNTL (fcntl64)

/* ---------------------------------------------------------------- questions */

#define STAT_CALL(name, answer)                                 \
  FAULTY (int, name, (const char *path, struct answer *found), at_path (STAT, path), (path, found))
#define FSTAT(name, answer)                                     \
  FAULTY (int, name, (int fd, struct answer *found), at_fd (STAT, fd), (fd, found))
#define FSTATAT(name, answer)                                   \
  FAULTY (int, name, (int folder, const char *path, struct answer *found, int flags), \
          at_entry (STAT, folder, path), (folder, path, found, flags))

STAT_CALL (stat, stat)
STAT_CALL (stat64, stat64)
STAT_CALL (lstat, stat)
STAT_CALL (lstat64, stat64)
FSTAT (fstat, stat)
FSTAT (fstat64, stat64)
FSTATAT (fstatat, stat)
FSTATAT (fstatat64, stat64)

FAULTY (int, statx, (int folder, const char *path, int flags, unsigned int mask, struct statx *found),
        at_entry (STAT, folder, path), (folder, path, flags, mask, found))
FAULTY (int, access, (const char *path, int mode), at_path (STAT, path), (path, mode))

/* nfs-ganesha makes its plugins look for functions in the C library first. */
void *
dlopen (const char *path, int flags)
{
  REAL (void *, dlopen, (const char *, int));

  return real (path, flags & ~RTLD_DEEPBIND);
}
