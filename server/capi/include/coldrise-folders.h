/* Coldrise's C ABI, second part: the repository as folders and files, for front
 * ends such as an NFS server. The conventions of coldrise.h hold here, too.
 *
 *   /web01/20261120T100000Z/vda.vhdx     never changes
 *   /web01/latest                        a link
 *   /live/trial/vda.raw                  a session's file, writable
 *
 * A node stands for a folder, a file or a link. It stays usable when that is gone:
 * every call on it fails with ESTALE then. Nodes need not be opened: reading and
 * writing open what they need, and what nobody has used for a while is closed, which
 * makes its writes durable. Who wants a file to stay open opens it.
 */

#ifndef COLDRISE_FOLDERS_H
#define COLDRISE_FOLDERS_H

#include "coldrise.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A repository, opened for serving as folders. */
typedef struct coldrise_folders coldrise_folders;

/* A folder, a file or a link in it. Many threads may use it at once; only its
 * release must come after every other call on it.
 */
typedef struct coldrise_node coldrise_node;

/* Opens the repository at `path`; see coldrise_repository_open, errno included.
 * `mounted_at` is the folder under which clients see the root, or NULL: a qcow2
 * image that has its data in another file names it by its whole path. Without the
 * flag COLDRISE_FOLDERS_READ_ONLY sessions can be written. A file that was not opened
 * and that nobody has used for `idle_ms` milliseconds is closed.
 */
#define COLDRISE_FOLDERS_READ_ONLY (1u << 0)

int coldrise_folders_open (const char *path,
                           const struct coldrise_options *options,
                           const char *mounted_at, uint32_t idle_ms,
                           uint32_t flags, coldrise_folders **folders);

/* Flushes and closes every file. Nodes that are left fail with ESTALE from here on
 * and still have to be released. NULL is allowed.
 */
void coldrise_folders_close (coldrise_folders *folders);

/* Receives the handle of a session's file: what is remembered of its attributes has to be
 * forgotten when this returns. It comes from a thread of the library, some moments after
 * they were asked for, and may call whatever it wants but coldrise_folders_watch.
 */
typedef void coldrise_forget_callback (void *context, const void *handle,
                                       size_t length);

/* Sets who is told to forget attributes, which may be remembered then; NULL: nobody. When
 * it returns no call of the one before is under way any more.
 */
void coldrise_folders_watch (const coldrise_folders *folders,
                             coldrise_forget_callback *callback,
                             void *context);

/* Space on the file system that the repository lies on, in bytes. */
struct coldrise_space {
  uint64_t total_bytes;
  uint64_t free_bytes;
  uint64_t available_bytes; /* what of it users other than root can have */
};

int coldrise_folders_space (const coldrise_folders *folders,
                            struct coldrise_space *space);

/* Nodes */

/* The folder in which everything is. */
int coldrise_node_root (const coldrise_folders *folders, coldrise_node **node);

/* What has that name in a folder. errno: ENOENT, ENOTDIR, ESTALE. */
int coldrise_node_find (const coldrise_node *folder, const char *name,
                        coldrise_node **node);

/* The folder that a node is in; the root's is the root. */
int coldrise_node_parent (const coldrise_node *node, coldrise_node **parent);

/* Gives a node back. NULL is allowed. */
void coldrise_node_release (coldrise_node *node);

/* Largest handle. */
#define COLDRISE_HANDLE_MAX 32

/* Writes what names the node to clients into `handle`, which must hold
 * COLDRISE_HANDLE_MAX bytes, and returns its length. The same node has the same
 * handle in every process and after every restart, and no other node ever has it.
 */
int coldrise_node_handle (const coldrise_node *node, void *handle);

/* The node of a handle. errno: ESTALE when it is gone (or never was), EINVAL for
 * bytes that are no handle.
 */
int coldrise_node_of_handle (const coldrise_folders *folders,
                             const void *handle, size_t length,
                             coldrise_node **node);

/* Receives one entry, and owns its node from here on. `cookie` is where a listing
 * goes on behind this entry. A return value other than 0 ends the listing.
 */
typedef int coldrise_entry_callback (void *context, const char *name,
                                     coldrise_node *node, uint64_t cookie);

/* Lists a folder behind a cookie, 0 for all of it. Cookies are at least 3 and below
 * 2^63, stay the same over restarts, and entries come in their order: what is added
 * or removed meanwhile does not repeat or hide any other entry. Returns 1 when the
 * folder's end was reached, 0 when the callback ended the listing.
 */
int coldrise_node_list (const coldrise_node *folder, uint64_t after,
                        coldrise_entry_callback *callback, void *context);

enum coldrise_node_type {
  COLDRISE_NODE_FOLDER = 1,
  COLDRISE_NODE_FILE = 2,
  COLDRISE_NODE_LINK = 3,
};

enum coldrise_node_type coldrise_node_type (const coldrise_node *node);

/* Unique number of what the node stands for; never 0, the root's is 1. */
uint64_t coldrise_node_id (const coldrise_node *node);

/* Its address, such as "web01/20261120T100000Z/vda.raw". Valid until its release. */
const char *coldrise_node_path (const coldrise_node *node);

struct coldrise_attributes {
  uint64_t size_bytes;
  uint64_t stored_bytes;
  int64_t modified_s;   /* of the content, since 1970 */
  int64_t changed_s;    /* of anything: content, mode, name */
  uint64_t change;      /* another number after every change */
  uint32_t modified_ns; /* a folder's differs whenever its entries do */
  uint32_t changed_ns;
  uint32_t mode;        /* permissions */
  uint32_t valid_s;     /* for so long they may be remembered, of a session's file until
                           coldrise_forget_callback comes; 0: not at all */
  uint32_t has_verifier;
  uint8_t verifier[8];  /* of a file made exclusively, until something was written to it
                           or its mode or time was set */
};

int coldrise_node_attributes (const coldrise_node *node,
                              struct coldrise_attributes *attributes);

/* Where a link leads, a name in its own folder; `target` must hold
 * COLDRISE_NAME_MAX bytes.
 */
int coldrise_node_target (const coldrise_node *link, char *target);

/* Files. On what cannot be written all that write fails with EROFS, among a
 * session's files with EACCES. EBUSY: another process writes the session; the message
 * says which.
 */

/* What an open is for, and what it denies to every other one. A deny holds for content:
 * all images of a session's disk are one disk.
 */
#define COLDRISE_SHARE_READ       (1u << 0)
#define COLDRISE_SHARE_WRITE      (1u << 1)
#define COLDRISE_SHARE_DENY_READ  (1u << 2)
#define COLDRISE_SHARE_DENY_WRITE (1u << 3)

/* Keeps the file open, so that nobody else can write the session (to write) or end it.
 * Each is to be closed as it was opened. errno: ETXTBSY, another open denies it.
 */
int coldrise_node_open (const coldrise_node *file, uint32_t share);
void coldrise_node_close (const coldrise_node *file, uint32_t share);

/* Makes another one of an open. Its own deny counts, too: only less than it had is always
 * given. After a failure it is what it was. errno: ETXTBSY.
 */
int coldrise_node_reopen (const coldrise_node *file, uint32_t held,
                          uint32_t share);

/* Whether a read or write without an open may be done. errno: ETXTBSY. */
int coldrise_node_check_share (const coldrise_node *file, uint32_t share);

/* Keeps open what is open of `other`, another node of the same file: it is about to be
 * released, and what it has opened is closed through `file`.
 */
int coldrise_node_take_over (const coldrise_node *file,
                             const coldrise_node *other);

/* Fails as a write would, and changes nothing. */
int coldrise_node_check_writable (const coldrise_node *file);

/* Fills `buffer` up to the file's end. `is_end` becomes 1 when nothing follows what
 * was read.
 */
int coldrise_node_read (const coldrise_node *file, void *buffer, size_t length,
                        uint64_t offset, int flags, size_t *filled,
                        int *is_end);

/* A flag: what would have to be opened, decoded, or read from a drive fails with EAGAIN. */
#define COLDRISE_READ_IN_MEMORY (1 << 0)

/* Writes; durable after the next flush. EFBIG: behind the end of what cannot grow. */
int coldrise_node_write (const coldrise_node *file, const void *buffer,
                         size_t length, uint64_t offset);

/* 1 where a write would have to read what it leaves unchanged from a drive, or to open the
 * file; else 0.
 */
int coldrise_node_write_waits (const coldrise_node *file, size_t length,
                               uint64_t offset);

/* What has to wait, on threads of the library: bounded in number, as is what waits for
 * them. errno: EAGAIN where there is no room; then the caller does it himself. The file may
 * not be released before the call back.
 */
typedef void coldrise_task_callback (void *context);
typedef void coldrise_done_callback (void *context, int result);

/* Runs `task`. */
int coldrise_node_run_later (const coldrise_node *file,
                             coldrise_task_callback *task, void *context);

/* coldrise_node_flush, together with all others of this file that come in time; `result` is
 * what it returned, with its errno and its message.
 */
int coldrise_node_flush_later (const coldrise_node *file,
                               coldrise_done_callback *done, void *context);

/* Makes durable every write to the file that completed before the call, of an image
 * also those through every other image of its disk; calls at the same time share the
 * work. After a failure with EIO, or where the session has stopped, the process has to
 * end: what was written and not flushed may be lost, and only another process with
 * another write verifier makes clients send it again.
 */
int coldrise_node_flush (const coldrise_node *file);

/* 1 when a failure has stopped the session of a file that is open for writing, else 0. */
int coldrise_node_has_stopped (const coldrise_node *file);

/* Makes a file longer or shorter. EOPNOTSUPP where the size follows from the disk's. */
int coldrise_node_set_size (const coldrise_node *file, uint64_t size);

/* What clients keep in the folder of a session, beside its disks. What these calls do is
 * durable when they return, and keeps the session open until it was idle for a while.
 * errno, besides EROFS, EACCES (also for the names of the session's own files) and
 * EBUSY as above: EINVAL and ENAMETOOLONG for what is no name, ENOTDIR, ENOSPC (also
 * where the session holds as many files as it can).
 */

enum coldrise_creation {
  COLDRISE_CREATE_UNCHECKED = 1, /* one that is there is as good */
  COLDRISE_CREATE_GUARDED = 2,   /* it must not be there */
  COLDRISE_CREATE_EXCLUSIVE = 3, /* nor, but for one made with the same verifier */
};

/* Makes an empty file; `verifier` holds 8 bytes where it is made exclusively. errno:
 * EEXIST, EISDIR.
 */
int coldrise_node_create (const coldrise_node *folder, const char *name,
                          int how, const void *verifier, uint32_t mode,
                          coldrise_node **node);

/* Makes a folder. errno: EEXIST. */
int coldrise_node_make_folder (const coldrise_node *folder, const char *name,
                               uint32_t mode, coldrise_node **node);

/* Removes a file, whoever has it open, or an empty folder. errno: ENOENT, ENOTEMPTY. */
int coldrise_node_remove (const coldrise_node *folder, const char *name);

/* Gives a file or folder another name; a file or empty folder that had it goes, at the
 * same moment. errno: ENOENT, EISDIR, ENOTDIR, ENOTEMPTY, EXDEV between sessions.
 */
int coldrise_node_rename (const coldrise_node *folder, const char *name,
                          const coldrise_node *new_folder, const char *new_name);

#define COLDRISE_CHANGE_MODE     (1u << 0)
#define COLDRISE_CHANGE_MODIFIED (1u << 1)

struct coldrise_changes {
  uint32_t what; /* which of these are to be set */
  uint32_t mode;
  int64_t modified_s;
  uint32_t modified_ns;
};

/* Sets permissions, which are told to clients and not enforced, and the time of the last
 * change. Of other files than clients' it is accepted and forgotten.
 */
int coldrise_node_change (const coldrise_node *node,
                          const struct coldrise_changes *changes);

#ifdef __cplusplus
}
#endif

#endif /* COLDRISE_FOLDERS_H */
