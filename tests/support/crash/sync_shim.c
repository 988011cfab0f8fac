/* Stands before fdatasync and fsync of the process it is preloaded into.
 *
 * The first letter of the file that COLDRISE_TEST_SYNC names says what happens:
 * 'f': fdatasync syncs nothing and returns EIO; 'l': it syncs nothing and returns
 * success; 'w': it waits until the letter is another one, and then syncs; 'p': fsync
 * of the file or folder whose path follows the letter syncs nothing and returns EIO;
 * anything else: as always. Every fdatasync that returns adds a byte to the file of
 * that name with ".count".
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Returns the letter; what follows it goes to `rest`. */
static char
order (char rest[PATH_MAX])
{
  const char *path = getenv ("COLDRISE_TEST_SYNC");
  char letter = 'o';
  ssize_t length;
  int fd;

  rest[0] = '\0';
  if (path == NULL || (fd = open (path, O_RDONLY | O_CLOEXEC)) == -1)
    return letter;
  if (read (fd, &letter, 1) != 1)
    letter = 'o';
  length = read (fd, rest, PATH_MAX - 1);
  rest[length > 0 ? length : 0] = '\0';
  close (fd);
  return letter;
}

static int
is_at (int fd, const char *path)
{
  char link[64], found[PATH_MAX];
  ssize_t length;

  snprintf (link, sizeof link, "/proc/self/fd/%d", fd);
  length = readlink (link, found, sizeof found - 1);
  if (length == -1)
    return 0;
  found[length] = '\0';
  return strcmp (found, path) == 0;
}

static void
count (void)
{
  const char *path = getenv ("COLDRISE_TEST_SYNC");
  char counted[PATH_MAX];
  int fd;

  if (path == NULL)
    return;
  snprintf (counted, sizeof counted, "%s.count", path);
  fd = open (counted, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (fd == -1)
    return;
  if (write (fd, ".", 1) != 1)
    perror (counted);
  close (fd);
}

int
fdatasync (int fd)
{
  static int (*real) (int);
  char rest[PATH_MAX];
  char letter;
  int result;

  while ((letter = order (rest)) == 'w')
    usleep (1000);
  switch (letter) {
  case 'f':
    errno = EIO;
    return -1;
  case 'l':
    return 0;
  default:
    if (real == NULL)
      real = (int (*) (int)) dlsym (RTLD_NEXT, "fdatasync");
    result = real (fd);
    count ();
    return result;
  }
}

int
fsync (int fd)
{
  static int (*real) (int);
  char rest[PATH_MAX];

  if (order (rest) == 'p' && is_at (fd, rest)) {
    errno = EIO;
    return -1;
  }
  if (real == NULL)
    real = (int (*) (int)) dlsym (RTLD_NEXT, "fsync");
  return real (fd);
}

/* nfs-ganesha has its plugins look for functions in the C library first. */
void *
dlopen (const char *path, int flags)
{
  static void *(*real) (const char *, int);

  if (real == NULL)
    real = (void *(*) (const char *, int)) dlsym (RTLD_NEXT, "dlopen");
  return real (path, flags & ~RTLD_DEEPBIND);
}
