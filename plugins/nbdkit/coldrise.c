/* nbdkit plugin: every restore point and every published session of a Coldrise
 * repository as an NBD export, and every point as image files in all formats.
 *
 * This file converts between nbdkit's calls and coldrise.h and decides nothing.
 * nbdkit may call everything below `open` from several threads at once.
 */

#include <dlfcn.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define NBDKIT_API_VERSION 2
#include <nbdkit-plugin.h>

#include "coldrise.h"

#define THREAD_MODEL NBDKIT_THREAD_MODEL_PARALLEL

/* Maximum number of exports that nbdkit accepts in one list. */
#define LIST_LIMIT 10000

/* Extents per request; nbdkit asks again for the rest. */
#define EXTENTS_LIMIT 16384

static char *repository_path;
static char *passphrase_file;
static char *passphrase_command;
static uint64_t cache_bytes = COLDRISE_CACHE_DEFAULT;
static uint32_t list_flags;

static coldrise_repository *repository;

/* Reports the message of the last call of coldrise.h. */
static void
report (void)
{
  int err = errno;

  nbdkit_error ("%s", coldrise_last_error ());
  nbdkit_set_error (err);
}

static int
check (int r)
{
  if (r == -1)
    report ();
  return r;
}

/* nbdkit -v -D coldrise.slow=MICROSECONDS logs each request that takes at least that
 * long; 0 logs none.
 */
NBDKIT_DLL_PUBLIC int coldrise_debug_slow;

static int64_t
started_us (void)
{
  struct timespec now;

  if (coldrise_debug_slow == 0)
    return 0;
  clock_gettime (CLOCK_MONOTONIC, &now);
  return (int64_t) now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

/* Reports the error of a client's request, with the name of its export, and a slow
 * request.
 */
static int
check_call (int r, int64_t started, const char *call, uint32_t count,
            uint64_t offset)
{
  int err = errno;
  int64_t took = started_us () - started;
  const char *name;

  if (coldrise_debug_slow != 0 && took >= coldrise_debug_slow)
    nbdkit_debug ("slow: %s count=%" PRIu32 " offset=%" PRIu64 ": %" PRId64
                  " us", call, count, offset, took);
  if (r == -1) {
    name = nbdkit_export_name ();
    nbdkit_error ("%s: %s", name != NULL ? name : "", coldrise_last_error ());
    nbdkit_set_error (err);
  }
  return r;
}

/* Configuration */

/* Takes over `value`; NULL means that nbdkit has already reported the error. */
static int
set_once (char **field, const char *key, char *value)
{
  if (value == NULL)
    return -1;
  if (*field != NULL) {
    nbdkit_error ("%s= is given twice", key);
    free (value);
    return -1;
  }
  *field = value;
  return 0;
}

static int
plugin_config (const char *key, const char *value)
{
  if (strcmp (key, "repo") == 0)
    return set_once (&repository_path, key, nbdkit_realpath (value));
  if (strcmp (key, "passphrase-file") == 0)
    return set_once (&passphrase_file, key, nbdkit_absolute_path (value));
  if (strcmp (key, "passphrase-command") == 0) {
    char *copy = strdup (value);
    if (copy == NULL)
      nbdkit_error ("strdup: %m");
    return set_once (&passphrase_command, key, copy);
  }
  if (strcmp (key, "chunk-cache") == 0) {
    int64_t size = nbdkit_parse_size (value);
    if (size == -1)
      return -1;
    cache_bytes = size;
    return 0;
  }
  if (strcmp (key, "list-formats") == 0) {
    int wanted = nbdkit_parse_bool (value);
    if (wanted == -1)
      return -1;
    list_flags = wanted ? COLDRISE_LIST_IMAGES : 0;
    return 0;
  }

  nbdkit_error ("unknown parameter '%s'", key);
  return -1;
}

#define plugin_config_help                                                  \
  "[repo=]DIR                (required) The Coldrise repository.\n"           \
  "passphrase-file=FILE      File that holds its passphrase.\n"               \
  "passphrase-command=CMD    Shell command that prints its passphrase; the\n" \
  "                          environment's COLDRISE_PASSPHRASE_COMMAND where\n" \
  "                          neither is given: everybody can read arguments.\n" \
  "chunk-cache=SIZE          Memory for decoded chunks (default: an eighth\n"    \
  "                          of the memory).\n"                               \
  "list-formats=BOOL         List image files, too (default: false).\n"        \
  "Exports are MACHINE/POINT/DISK (read-only; POINT may be latest) and\n"     \
  "live/SESSION/DISK (writable), and MACHINE/POINT/DISK.FORMAT for the disk\n" \
  "as an image file: .raw .vhd .vhdx .vmdk .qcow2 and others."

static struct coldrise_options
options (void)
{
  return (struct coldrise_options) {
    .program = "nbdkit",
    .passphrase_file = passphrase_file,
    .passphrase_command = passphrase_command,
    .cache_bytes = cache_bytes,
  };
}

static int
plugin_config_complete (void)
{
  if (repository_path == NULL) {
    nbdkit_error ("repo=DIR is missing: it names the Coldrise repository");
    return -1;
  }
  if (passphrase_file != NULL && passphrase_command != NULL) {
    nbdkit_error ("passphrase-file= and passphrase-command= exclude each other");
    return -1;
  }
  if (passphrase_file == NULL && passphrase_command == NULL) {
    const char *given = getenv ("COLDRISE_PASSPHRASE_COMMAND");

    if (given != NULL && *given != '\0') {
      passphrase_command = strdup (given);
      if (passphrase_command == NULL) {
        nbdkit_error ("strdup: %m");
        return -1;
      }
    }
  }
  return 0;
}

/* Messages are still visible here, but threads would not survive the fork. */
static int
plugin_get_ready (void)
{
  struct coldrise_options opts = options ();

  return check (coldrise_repository_check (repository_path, &opts));
}

static int
plugin_after_fork (void)
{
  struct coldrise_options opts = options ();

  return check (coldrise_repository_open (repository_path, &opts, &repository));
}

static void
plugin_cleanup (void)
{
  coldrise_repository_close (repository);
  repository = NULL;
}

static void
plugin_unload (void)
{
  free (repository_path);
  free (passphrase_file);
  free (passphrase_command);
}

static void
plugin_dump_plugin (void)
{
  printf ("coldrise_version=%s\n", coldrise_version ());
}

/* Names */

static int
add_export (void *context, const char *name, const char *description)
{
  return nbdkit_add_export (context, name, description);
}

static int
plugin_list_exports (int readonly, int is_tls,
                     struct nbdkit_exports *exports)
{
  (void) readonly;
  (void) is_tls;
  return check (coldrise_exports_list (repository, LIST_LIMIT, list_flags,
                                       add_export, exports));
}

static const char *
plugin_default_export (int readonly, int is_tls)
{
  char name[COLDRISE_NAME_MAX];

  (void) readonly;
  (void) is_tls;
  if (check (coldrise_exports_default (repository, name)) != 1)
    return NULL;
  return nbdkit_strdup_intern (name);
}

/* Connections */

/* Kinds of answers to a client that opens an export. */
#define NBD_REP_ERR_POLICY UINT32_C (0x80000002)
#define NBD_REP_ERR_UNKNOWN UINT32_C (0x80000006)

/* Tells the client the reason: nbdkit itself always says "unknown export". The
 * preloaded library, if it is loaded, sends this instead.
 */
static void
refuse (int err)
{
  void (*send_refusal) (uint32_t, const char *);

  send_refusal = (void (*) (uint32_t, const char *)) dlsym (RTLD_DEFAULT, "coldrise_nbd_refuse");
  if (send_refusal != NULL)
    send_refusal (err == ENOENT || err == EINVAL ? NBD_REP_ERR_UNKNOWN
                                                 : NBD_REP_ERR_POLICY,
                  coldrise_last_error ());
  errno = err;
}

static void *
plugin_open (int readonly)
{
  const char *name = nbdkit_export_name ();
  coldrise_export *handle;

  if (name == NULL)
    return NULL;
  if (coldrise_export_open (repository, name, readonly, &handle) == -1) {
    refuse (errno);
    report ();
    return NULL;
  }
  return handle;
}

static void
plugin_close (void *handle)
{
  coldrise_export_close (handle);
}

static const char *
plugin_describe (void *handle)
{
  return coldrise_export_description (handle);
}

static int64_t
plugin_get_size (void *handle)
{
  return coldrise_export_size (handle);
}

/* Any request is allowed; whole blocks are captured without reading them. */
static int
plugin_block_size (void *handle, uint32_t *minimum, uint32_t *preferred,
                   uint32_t *maximum)
{
  (void) handle;
  *minimum = 1;
  *preferred = 4096;
  *maximum = 32 << 20;
  return 0;
}

static int
is_writable (void *handle)
{
  return (coldrise_export_flags (handle) & COLDRISE_EXPORT_WRITABLE) != 0;
}

static int
always (void *handle)
{
  (void) handle;
  return 1;
}

static int
plugin_can_fua (void *handle)
{
  (void) handle;
  return NBDKIT_FUA_NATIVE;
}

static int
plugin_can_cache (void *handle)
{
  (void) handle;
  return NBDKIT_CACHE_NATIVE;
}

/* Data */

static uint32_t
fua (uint32_t flags)
{
  return flags & NBDKIT_FLAG_FUA ? COLDRISE_FUA : 0;
}

static int
plugin_pread (void *handle, void *buf, uint32_t count, uint64_t offset,
              uint32_t flags)
{
  int64_t started = started_us ();

  (void) flags;
  return check_call (coldrise_export_read (handle, buf, count, offset),
                     started, "pread", count, offset);
}

static int
plugin_pwrite (void *handle, const void *buf, uint32_t count,
               uint64_t offset, uint32_t flags)
{
  int64_t started = started_us ();

  return check_call (coldrise_export_write (handle, buf, count, offset, fua (flags)),
                     started, "pwrite", count, offset);
}

static int
plugin_flush (void *handle, uint32_t flags)
{
  int64_t started = started_us ();

  (void) flags;
  return check_call (coldrise_export_flush (handle),
                     started, "flush", 0, 0);
}

static int
plugin_trim (void *handle, uint32_t count, uint64_t offset, uint32_t flags)
{
  int64_t started = started_us ();

  return check_call (coldrise_export_trim (handle, count, offset, fua (flags)),
                     started, "trim", count, offset);
}

/* Zeroes are a record, never bytes: always fast, and FAST_ZERO and MAY_TRIM make no
 * difference.
 */
static int
plugin_zero (void *handle, uint32_t count, uint64_t offset, uint32_t flags)
{
  int64_t started = started_us ();

  return check_call (coldrise_export_zero (handle, count, offset, fua (flags)),
                     started, "zero", count, offset);
}

static int
add_extent (void *context, uint64_t offset, uint64_t length, uint32_t flags)
{
  return nbdkit_add_extent (context, offset, length,
                            flags & COLDRISE_EXTENT_HOLE
                            ? NBDKIT_EXTENT_ZERO | NBDKIT_EXTENT_HOLE : 0);
}

static int
plugin_extents (void *handle, uint32_t count, uint64_t offset,
                uint32_t flags, struct nbdkit_extents *extents)
{
  size_t limit = flags & NBDKIT_FLAG_REQ_ONE ? 1 : EXTENTS_LIMIT;
  int64_t started = started_us ();

  return check_call (coldrise_export_extents (handle, count, offset, limit,
                                              add_extent, extents),
                     started, "extents", count, offset);
}

static int
plugin_cache (void *handle, uint32_t count, uint64_t offset, uint32_t flags)
{
  int64_t started = started_us ();

  (void) flags;
  return check_call (coldrise_export_prefetch (handle, count, offset),
                     started, "cache", count, offset);
}

static struct nbdkit_plugin plugin = {
  .name               = "coldrise",
  .longname           = "Coldrise instant recovery",
  .version            = COLDRISE_VERSION,
  .description        = "Serve backups of virtual machines as writable disks",
  .unload             = plugin_unload,
  .config             = plugin_config,
  .config_complete    = plugin_config_complete,
  .config_help        = plugin_config_help,
  .magic_config_key   = "repo",
  .get_ready          = plugin_get_ready,
  .after_fork         = plugin_after_fork,
  .cleanup            = plugin_cleanup,
  .dump_plugin        = plugin_dump_plugin,
  .list_exports       = plugin_list_exports,
  .default_export     = plugin_default_export,
  .open               = plugin_open,
  .close              = plugin_close,
  .export_description = plugin_describe,
  .get_size           = plugin_get_size,
  .block_size         = plugin_block_size,
  .can_write          = is_writable,
  .can_flush          = is_writable,
  .can_trim           = is_writable,
  .can_zero           = is_writable,
  .can_fast_zero      = is_writable,
  .can_extents        = always,
  .can_fua            = plugin_can_fua,
  .can_multi_conn     = always,
  .can_cache          = plugin_can_cache,
  .pread              = plugin_pread,
  .pwrite             = plugin_pwrite,
  .flush              = plugin_flush,
  .trim               = plugin_trim,
  .zero               = plugin_zero,
  .extents            = plugin_extents,
  .cache              = plugin_cache,
};

NBDKIT_REGISTER_PLUGIN (plugin)
