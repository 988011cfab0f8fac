/* A C program on the C ABI: the promises of the header, checked from outside.
 *
 * usage: client REPOSITORY PASSPHRASE-FILE MACHINE/POINT/DISK live/SESSION/DISK
 *
 * The point's first 4096 bytes are not zero, its second MiB is a hole.
 */

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "coldrise.h"

#define CHECK(condition)                                                      \
  do {                                                                        \
    if (!(condition)) {                                                       \
      fprintf (stderr, "line %d: %s (errno %d: %s)\n", __LINE__, #condition,  \
               errno, coldrise_last_error ());                                \
      exit (EXIT_FAILURE);                                                    \
    }                                                                         \
  } while (0)

#define FAILS(call, expected)                                                 \
  do {                                                                        \
    errno = 0;                                                                \
    CHECK ((call) == -1);                                                     \
    CHECK (errno == (expected));                                              \
    CHECK (coldrise_last_error ()[0] != '\0');                                \
  } while (0)

struct listing {
  const char *wanted;
  int seen, found;
};

static int
on_name (void *context, const char *name, const char *description)
{
  struct listing *listing = context;

  CHECK (strlen (name) < COLDRISE_NAME_MAX && description[0] != '\0');
  listing->seen++;
  listing->found += strcmp (name, listing->wanted) == 0;
  return 0;
}

static int
stop (void *context, const char *name, const char *description)
{
  (void) context;
  (void) name;
  (void) description;
  return 1;
}

static int
on_extent (void *context, uint64_t offset, uint64_t length, uint32_t flags)
{
  uint64_t *extent = context;

  extent[0] = offset;
  extent[1] = length;
  extent[2] = flags;
  return 0;
}

int
main (int argc, char *argv[])
{
  CHECK (argc == 5);
  const char *path = argv[1], *passphrase = argv[2];
  const char *point = argv[3], *live = argv[4];
  char name[COLDRISE_NAME_MAX];
  char first[4096], bytes[4096];
  uint64_t extent[3];
  coldrise_repository *repository;
  coldrise_export *export, *other;

  CHECK (coldrise_version ()[0] != '\0');

  struct coldrise_options options = { .program = "client", .cache_bytes = 1 << 20 };
  FAILS (coldrise_repository_check ("/nowhere", &options), ENOENT);
  FAILS (coldrise_repository_open ("/nowhere", &options, &repository), ENOENT);
  FAILS (coldrise_repository_open (path, &options, &repository), EACCES);
  options.passphrase_file = passphrase;
  options.passphrase_command = "true";
  FAILS (coldrise_repository_open (path, &options, &repository), EINVAL);
  options.passphrase_command = NULL;
  CHECK (coldrise_repository_check (path, &options) == 0);
  CHECK (coldrise_repository_open (path, &options, &repository) == 0);

  struct listing listing = { .wanted = live };
  CHECK (coldrise_exports_list (repository, 100, 0, on_name, &listing) == 0);
  CHECK (listing.seen == 2 && listing.found == 1);
  FAILS (coldrise_exports_list (repository, 100, 0, stop, NULL), ECANCELED);
  FAILS (coldrise_exports_list (repository, 100, 2, on_name, &listing), EINVAL);
  CHECK (coldrise_exports_default (repository, name) == 0);

  FAILS (coldrise_export_open (repository, "no/such/name", 0, &export), EINVAL);
  FAILS (coldrise_export_open (repository, "live/other/vda", 0, &export), ENOENT);
  FAILS (coldrise_export_open (repository, "web01/latest/vda.stream.vmdk", 0,
                               &export), EOPNOTSUPP);

  CHECK (coldrise_export_open (repository, point, 0, &export) == 0);
  CHECK (coldrise_export_flags (export) == 0);
  CHECK (strcmp (coldrise_export_name (export), point) == 0);
  CHECK (coldrise_export_read (export, first, sizeof first, 0) == 0);
  FAILS (coldrise_export_write (export, first, sizeof first, 0, 0), EROFS);
  FAILS (coldrise_export_zero (export, 4096, 0, 0), EROFS);
  FAILS (coldrise_export_trim (export, 4096, 0, 0), EROFS);
  CHECK (coldrise_export_prefetch (export, 1 << 20, 0) == 0);
  CHECK (coldrise_export_extents (export, 4096, 1 << 20, 1, on_extent, extent) == 0);
  CHECK (extent[0] == 1 << 20 && extent[1] >= 4096);
  CHECK (extent[2] == COLDRISE_EXTENT_HOLE);
  coldrise_export_close (export);

  CHECK (coldrise_export_open (repository, live, 0, &export) == 0);
  CHECK (coldrise_export_open (repository, live, 0, &other) == 0);
  CHECK (coldrise_export_flags (export) == COLDRISE_EXPORT_WRITABLE);
  uint64_t size = coldrise_export_size (export);
  FAILS (coldrise_export_read (export, bytes, 2, size - 1), EINVAL);
  FAILS (coldrise_export_write (export, bytes, 2, UINT64_MAX, 0), EINVAL);
  memset (bytes, 'c', sizeof bytes);
  CHECK (coldrise_export_write (export, bytes, 100, 50, COLDRISE_FUA) == 0);
  memcpy (first + 50, bytes, 100);
  CHECK (coldrise_export_read (other, bytes, sizeof bytes, 0) == 0);
  CHECK (memcmp (bytes, first, sizeof bytes) == 0);
  CHECK (coldrise_export_zero (other, 4000, 96, 0) == 0);
  memset (first + 96, 0, 4000);
  CHECK (coldrise_export_flush (export) == 0);
  CHECK (coldrise_export_read (export, bytes, sizeof bytes, 0) == 0);
  CHECK (memcmp (bytes, first, sizeof bytes) == 0);
  CHECK (coldrise_export_trim (export, 4096, 0, COLDRISE_FUA) == 0);
  CHECK (coldrise_export_read (export, bytes, sizeof bytes, 0) == 0);
  memset (first, 0, sizeof first);
  CHECK (memcmp (bytes, first, sizeof bytes) == 0);

  /* One is closed by us, the other with its repository. */
  coldrise_export_close (other);
  coldrise_repository_close (repository);

  CHECK (coldrise_repository_open (path, &options, &repository) == 0);
  CHECK (coldrise_export_open (repository, live, 0, &export) == 0);
  CHECK (coldrise_export_read (export, bytes, sizeof bytes, 0) == 0);
  CHECK (memcmp (bytes, first, sizeof bytes) == 0);
  coldrise_export_close (export);
  coldrise_repository_close (repository);
  return EXIT_SUCCESS;
}
