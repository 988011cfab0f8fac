/* Coldrise's C ABI: what the nbdkit plugin and the Ganesha FSAL call.
 *
 * Conventions
 *
 * - Functions that return int return 0 (or a documented positive value) on
 *   success. On failure they return -1, set errno, and leave a message for
 *   people that coldrise_last_error() returns to the same thread.
 * - Every function may be called from any thread. An export may be used by many
 *   threads at once; only its close must come after every other call on it.
 * - A repository starts threads and opens RocksDB: open it after the last
 *   fork(2).
 * - Strings are NUL-terminated. Names of exports are UTF-8, at most
 *   COLDRISE_NAME_MAX bytes with the NUL; a longer one is refused.
 * - A defect (a panic) inside Coldrise never unwinds into the caller: the call
 *   fails with EIO, and so does every later call on that export and, where it
 *   belongs to a published session, on the other exports of that session.
 */

#ifndef COLDRISE_H
#define COLDRISE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Largest export name with its NUL: `live/` or a machine, a point and a disk,
 * each of at most 63 bytes, the ending of an image's name, and the slashes
 * between them, rounded up.
 */
#define COLDRISE_NAME_MAX 256

/* A repository, opened for serving. */
typedef struct coldrise_repository coldrise_repository;

/* One disk of it, or one file of an image of a disk, under one name. */
typedef struct coldrise_export coldrise_export;

/* For `cache_bytes`: an eighth of the memory that this process may use. */
#define COLDRISE_CACHE_DEFAULT UINT64_MAX

/* How to open a repository. Zero-initialise it, then set what is needed. */
struct coldrise_options {
  const char *program;            /* who serves, for the lease; NULL: "unknown" */
  const char *passphrase_file;    /* NULL: none. Not together with the next. */
  const char *passphrase_command; /* run with `sh -c`; NULL: none */
  uint64_t cache_bytes;           /* cache of decoded chunks at most; 0: off */
};

/* Version of Coldrise, for example "0.1.0". Static. */
const char *coldrise_version (void);

/* Message of the last call of this thread that failed, never NULL. Valid until
 * this thread's next failing call.
 */
const char *coldrise_last_error (void);

/* Checks what can be checked without starting a thread: that there is a
 * repository at `path` and that the passphrase file can be read. It is meant for
 * the time before a daemon forks, when the user still sees messages; it does
 * not replace coldrise_repository_open.
 */
int coldrise_repository_check (const char *path,
                               const struct coldrise_options *options);

/* Opens the repository at `path` and takes a lease on what will be served.
 * errno: ENOENT no repository there, EACCES wrong or missing passphrase,
 * EINVAL options that contradict each other, EIO anything stored is damaged.
 */
int coldrise_repository_open (const char *path,
                              const struct coldrise_options *options,
                              coldrise_repository **repository);

/* Closes the exports that are still open, whose pointers end with this call,
 * and gives the repository and its lease back. NULL is allowed.
 */
void coldrise_repository_close (coldrise_repository *repository);

/* Receives one export. Both strings are valid during the call only. A return
 * value other than 0 stops the listing, which then fails with ECANCELED.
 */
typedef int coldrise_list_callback (void *context, const char *name,
                                    const char *description);

/* Restore points' disks are listed as image files in every format, too. */
#define COLDRISE_LIST_IMAGES (1u << 0)

/* Lists disks of published sessions, then of restore points, by exact name. Of
 * more than `limit` exports the sessions and the newest points are listed.
 * `flags` are COLDRISE_LIST_* or 0; they change nothing of what can be opened.
 */
int coldrise_exports_list (coldrise_repository *repository, size_t limit,
                           uint32_t flags, coldrise_list_callback *callback,
                           void *context);

/* Writes the name that stands for no name into `name`, which must hold
 * COLDRISE_NAME_MAX bytes. Returns 1 when there is one (the repository has
 * exactly one export), 0 when there is none, -1 on failure.
 */
int coldrise_exports_default (coldrise_repository *repository, char *name);

/* Opens an export: `MACHINE/POINT/DISK` (always read-only; POINT may be
 * `latest` or `latest~N`), `MACHINE/POINT/FILE` (the same disk as the bytes of an
 * image file, such as `vda.vhdx`; docs/formats.md has the names) or
 * `live/SESSION/DISK`. With `read_only` a session's disk is opened for reading
 * only, also while another process writes it.
 * errno: ENOENT no such name, EINVAL no possible name, EBUSY another process
 * writes the session, EOPNOTSUPP the disk cannot be shown in that format.
 */
int coldrise_export_open (coldrise_repository *repository, const char *name,
                          int read_only, coldrise_export **export_);

/* Gives the export back. NULL is allowed. The last export of a session closes
 * the session, which makes its captured writes durable.
 */
void coldrise_export_close (coldrise_export *export_);

/* Size in bytes; it never changes while the export is open. */
uint64_t coldrise_export_size (const coldrise_export *export_);

/* The export can be written. */
#define COLDRISE_EXPORT_WRITABLE (1u << 0)

/* COLDRISE_EXPORT_* flags. */
uint32_t coldrise_export_flags (const coldrise_export *export_);

/* Exact name (`latest` resolved) and one line for people. Valid while the
 * export is open.
 */
const char *coldrise_export_name (const coldrise_export *export_);
const char *coldrise_export_description (const coldrise_export *export_);

/* The data path. A range that leaves the disk fails with EINVAL and changes
 * nothing; any alignment is served. On an export that is not writable all that
 * write fail with EROFS. ENOSPC: no space for captured writes. EIO: the message
 * says what is damaged or was refused. With no length nothing happens.
 */

/* The effect is durable, not only done, when the call returns. */
#define COLDRISE_FUA (1u << 0)

int coldrise_export_read (const coldrise_export *export_, void *buffer,
                          size_t length, uint64_t offset);
int coldrise_export_write (const coldrise_export *export_, const void *buffer,
                           size_t length, uint64_t offset, uint32_t flags);

/* Makes durable every write that completed before the call, through whichever
 * export of the session it came. After a failure no later flush succeeds until
 * the session is opened anew.
 */
int coldrise_export_flush (const coldrise_export *export_);

/* Makes a range read as zeroes. */
int coldrise_export_zero (const coldrise_export *export_, uint64_t length,
                          uint64_t offset, uint32_t flags);

/* Says that a range is no longer needed: whole blocks of 4096 bytes in it read
 * as zeroes afterwards, the rest is unchanged.
 */
int coldrise_export_trim (const coldrise_export *export_, uint64_t length,
                          uint64_t offset, uint32_t flags);

/* Decodes a range into the chunk cache, as far as there is room for it. */
int coldrise_export_prefetch (const coldrise_export *export_, uint64_t length,
                              uint64_t offset);

/* The range reads as zeroes and takes no space: nothing was ever stored there, or zeroes
 * were.
 */
#define COLDRISE_EXTENT_HOLE (1u << 0)

/* Receives one extent. A return value other than 0 ends the call, which then
 * fails with ECANCELED.
 */
typedef int coldrise_extent_callback (void *context, uint64_t offset,
                                      uint64_t length, uint32_t flags);

/* Reports what a range holds, in order and without gaps from `offset` on, in at
 * most `limit` extents (at least 1); the answer may end before the range does.
 */
int coldrise_export_extents (const coldrise_export *export_, uint64_t length,
                             uint64_t offset, size_t limit,
                             coldrise_extent_callback *callback,
                             void *context);

#ifdef __cplusplus
}
#endif

#endif /* COLDRISE_H */
