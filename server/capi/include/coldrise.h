/* Coldrise's C ABI for the nbdkit plugin and the Ganesha FSAL.
 *
 * Conventions
 *
 * - Functions that return int return 0 (or a documented positive value) on
 *   success. On failure they return -1, set errno, and leave a message for
 *   people; coldrise_last_error() returns it to the same thread.
 * - Any thread may call any function. Many threads may use an export at once;
 *   only its close must come after all other calls on it.
 * - A repository starts threads and opens RocksDB: open it after the last
 *   fork(2).
 * - Strings are NUL-terminated. Names of exports are UTF-8, at most
 *   COLDRISE_NAME_MAX bytes with the NUL; longer ones are refused.
 * - A defect (a panic) inside Coldrise never unwinds into the caller: the call
 *   fails with EIO, and so does every later call on that export. If the export
 *   belongs to a published session, the other exports of that session fail too.
 */

#ifndef COLDRISE_H
#define COLDRISE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Maximum length of an export name with its NUL: `live/` or a machine, a point and a
 * disk, each of at most 63 bytes, the extension of an image's name, and the slashes
 * between them, rounded up.
 */
#define COLDRISE_NAME_MAX 256

/* A repository, opened for serving. */
typedef struct coldrise_repository coldrise_repository;

/* One disk of it, or one file of a disk's image, under one name. */
typedef struct coldrise_export coldrise_export;

/* For `cache_bytes`: one eighth of the memory that this process may use. */
#define COLDRISE_CACHE_DEFAULT UINT64_MAX

/* Options for opening a repository. Zero-initialise it, then set the needed fields.
 */
struct coldrise_options {
  const char *program;            /* the server's name in the lease; NULL: "unknown" */
  const char *passphrase_file;    /* NULL: none. Not together with the next. */
  const char *passphrase_command; /* run with `sh -c`; NULL: none */
  uint64_t cache_bytes;           /* maximum cache of decoded chunks; 0: off */
};

/* Version of Coldrise, for example "0.1.0". Static. */
const char *coldrise_version (void);

/* Message of this thread's last failed call, never NULL. Valid until this thread's
 * next failing call.
 */
const char *coldrise_last_error (void);

/* Checks, without starting a thread, that `path` holds a repository and that the
 * passphrase file is readable. Call it before a daemon forks, while the user still
 * sees messages; it does not replace coldrise_repository_open.
 */
int coldrise_repository_check (const char *path,
                               const struct coldrise_options *options);

/* Opens the repository at `path` and takes a lease for everything that will be
 * served. errno: ENOENT no repository there, EACCES wrong or missing passphrase,
 * EINVAL contradictory options, EIO stored data is damaged.
 */
int coldrise_repository_open (const char *path,
                              const struct coldrise_options *options,
                              coldrise_repository **repository);

/* Closes the open exports, whose pointers become invalid, and releases the repository
 * and its lease. NULL is allowed.
 */
void coldrise_repository_close (coldrise_repository *repository);

/* Receives one export. Both strings are valid during the call only. A return value
 * other than 0 stops the listing, which then fails with ECANCELED.
 */
typedef int coldrise_list_callback (void *context, const char *name,
                                    const char *description);

/* Also list the disks of restore points as image files in every format. */
#define COLDRISE_LIST_IMAGES (1u << 0)

/* Lists the disks of published sessions, then of restore points, by exact name. Above
 * `limit` exports the list keeps the sessions and the newest points. `flags` are
 * COLDRISE_LIST_* or 0; they do not restrict what clients can open.
 */
int coldrise_exports_list (coldrise_repository *repository, size_t limit,
                           uint32_t flags, coldrise_list_callback *callback,
                           void *context);

/* Writes the name of the default export into `name`, which must hold
 * COLDRISE_NAME_MAX bytes. Returns 1 if it exists (the repository has exactly one
 * export), 0 if not, -1 on failure.
 */
int coldrise_exports_default (coldrise_repository *repository, char *name);

/* Opens an export: `MACHINE/POINT/DISK` (always read-only; POINT may be `latest` or
 * `latest~N`), `MACHINE/POINT/FILE` (the same disk as the bytes of an image file,
 * such as `vda.vhdx`; docs/formats.md has the names) or `live/SESSION/DISK`. With
 * `read_only` a session's disk opens for reading only, also while another process
 * writes it. errno: ENOENT no such name, EINVAL impossible name, EBUSY another
 * process writes the session, EOPNOTSUPP that format cannot hold the disk.
 */
int coldrise_export_open (coldrise_repository *repository, const char *name,
                          int read_only, coldrise_export **export_);

/* Closes the export. NULL is allowed. Closing the last export of a session closes the
 * session, which makes its captured writes durable.
 */
void coldrise_export_close (coldrise_export *export_);

/* Size in bytes; it does not change while the export is open. */
uint64_t coldrise_export_size (const coldrise_export *export_);

/* The export is writable. */
#define COLDRISE_EXPORT_WRITABLE (1u << 0)

/* COLDRISE_EXPORT_* flags. */
uint32_t coldrise_export_flags (const coldrise_export *export_);

/* Exact name (`latest` resolved) and one line for people. Valid while the export is
 * open.
 */
const char *coldrise_export_name (const coldrise_export *export_);
const char *coldrise_export_description (const coldrise_export *export_);

/* The data path. Any alignment is allowed. A range that leaves the disk fails with
 * EINVAL and changes nothing. On a read-only export all changes fail with EROFS.
 * ENOSPC: no space for captured writes. EIO: the message says what is damaged or was
 * refused. A length of 0 does nothing.
 */

/* The effect is durable when the call returns. */
#define COLDRISE_FUA (1u << 0)

int coldrise_export_read (const coldrise_export *export_, void *buffer,
                          size_t length, uint64_t offset);
int coldrise_export_write (const coldrise_export *export_, const void *buffer,
                           size_t length, uint64_t offset, uint32_t flags);

/* Makes every write durable that completed before the call, through any export of the
 * session. After a failure every later flush fails until the session is reopened.
 */
int coldrise_export_flush (const coldrise_export *export_);

/* Makes a range read as zeroes. */
int coldrise_export_zero (const coldrise_export *export_, uint64_t length,
                          uint64_t offset, uint32_t flags);

/* Tells that a range is no longer needed: whole blocks of 4096 bytes in it then read
 * as zeroes, the rest is unchanged.
 */
int coldrise_export_trim (const coldrise_export *export_, uint64_t length,
                          uint64_t offset, uint32_t flags);

/* Decodes a range into the chunk cache, as far as it has space. */
int coldrise_export_prefetch (const coldrise_export *export_, uint64_t length,
                              uint64_t offset);

/* The range reads as zeroes and takes no space: it was never written, or zeroes were
 * written.
 */
#define COLDRISE_EXTENT_HOLE (1u << 0)

/* Receives one extent. A return value other than 0 ends the call, which then fails
 * with ECANCELED.
 */
typedef int coldrise_extent_callback (void *context, uint64_t offset,
                                      uint64_t length, uint32_t flags);

/* Reports the extents of a range, in order and without gaps from `offset` on, at most
 * `limit` of them (at least 1); the answer may end before the range does.
 */
int coldrise_export_extents (const coldrise_export *export_, uint64_t length,
                             uint64_t offset, size_t limit,
                             coldrise_extent_callback *callback,
                             void *context);

#ifdef __cplusplus
}
#endif

#endif /* COLDRISE_H */
