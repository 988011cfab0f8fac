/* Stands before fdatasync of the process it is preloaded into.
 *
 * The first letter of the file that COLDRISE_TEST_SYNC names says what happens:
 * 'f': nothing is synced, EIO is returned; 'l': nothing is synced, success is
 * returned; anything else: as always.
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

static char
order (void)
{
  const char *path = getenv ("COLDRISE_TEST_SYNC");
  char letter = 'o';
  int fd;

  if (path == NULL || (fd = open (path, O_RDONLY | O_CLOEXEC)) == -1)
    return letter;
  if (read (fd, &letter, 1) != 1)
    letter = 'o';
  close (fd);
  return letter;
}

int
fdatasync (int fd)
{
  static int (*real) (int);

  switch (order ()) {
  case 'f':
    errno = EIO;
    return -1;
  case 'l':
    return 0;
  default:
    if (real == NULL)
      real = (int (*) (int)) dlsym (RTLD_NEXT, "fdatasync");
    return real (fd);
  }
}
