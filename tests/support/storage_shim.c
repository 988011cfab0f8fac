/* Stands before the file operations of the process it is preloaded into.
 *
 * The first letter of the file that COLDRISE_TEST_SYNC names says what becomes of syncs:
 * 'f': fdatasync syncs nothing and returns EIO; 'l': it syncs nothing and returns
 * success; 'w': it waits until the letter is another one, and then syncs; 'p': fsync
 * of the file or folder whose path follows the letter syncs nothing and returns EIO;
 * anything else: as always. Every fdatasync that returns adds a byte to the file of
 * that name with ".count".
 *
 * The file that COLDRISE_TEST_FAULTS names, a struct plan, says which call below a folder
 * fails, and counts the calls there, in all processes together.
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
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum family { OPEN, READ, WRITE, SYNC, RENAME, UNLINK, TRUNCATE, MKDIR, LINK, FAMILIES };

/* What becomes of the call; a positive number is an errno. */
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

/* Counts a call; returns what becomes of it, 0 for nothing. */
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
at_entry (enum family family, int fd, const char *name)
{
  return name[0] == '/' || fd == AT_FDCWD ? at_path (family, name) : at_fd (family, fd);
}

static void
after (int action)
{
  if (action == KILL_AFTER)
    kill (getpid (), SIGKILL);
}

/* The call, or its failure. */
#define CALL(action, call)                                      \
  do {                                                          \
    __typeof__ (call) result;                                   \
    if ((action) > 0) {                                         \
      errno = (action);                                         \
      return -1;                                                \
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

int
openat64 (int folder, const char *path, int flags, ...)
{
  va_list rest;
  mode_t mode;
  int action;
  REAL (int, openat64, int, const char *, int, ...);

  va_start (rest, flags);
  mode = mode_of (flags, rest);
  va_end (rest);
  action = at_entry (OPEN, folder, path);
  CALL (action, real (folder, path, flags, mode));
}

FILE *
fopen (const char *path, const char *mode)
{
  REAL (FILE *, fopen, const char *, const char *);
  int action = at_path (OPEN, path);
  FILE *file;

  if (action > 0) {
    errno = action;
    return NULL;
  }
  file = real (path, mode);
  after (action);
  return file;
}

DIR *
opendir (const char *path)
{
  REAL (DIR *, opendir, const char *);
  int action = at_path (OPEN, path);

  if (action > 0) {
    errno = action;
    return NULL;
  }
  return real (path);
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
    /* The stream has to know as well: reading a folder fails. */
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

ssize_t
writev (int fd, const struct iovec *parts, int count)
{
  REAL (ssize_t, writev, int, const struct iovec *, int);
  int action = at_fd (WRITE, fd);

  CALL (action, real (fd, parts, (int) shortened (action, count)));
}

/* ---------------------------------------------------------------- syncs */

/* Returns the letter; what follows it goes to `rest`. */
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
  /* Without flags it only asks whether there is such a call. */
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

int
fallocate (int fd, int mode, off_t offset, off_t length)
{
  REAL (int, fallocate, int, int, off_t, off_t);
  int action = at_fd (TRUNCATE, fd);

  CALL (action, real (fd, mode, offset, length));
}

int
mkdir (const char *path, mode_t mode)
{
  REAL (int, mkdir, const char *, mode_t);
  int action = at_path (MKDIR, path);

  CALL (action, real (path, mode));
}

int
link (const char *from, const char *to)
{
  REAL (int, link, const char *, const char *);
  int action = at_path (LINK, to);

  CALL (action, real (from, to));
}

/* nfs-ganesha has its plugins look for functions in the C library first. */
void *
dlopen (const char *path, int flags)
{
  REAL (void *, dlopen, const char *, int);

  return real (path, flags & ~RTLD_DEEPBIND);
}
