/* Coldrise's C ABI, second part: the repository as folders and files, for front ends
 * such as an NFS server. The conventions of coldrise.h apply.
 *
 *   /web01/20261120T100000Z/vda.vhdx     never changes
 *   /web01/latest                        a link
 *   /live/trial/vda.raw                  a session's file, writable
 *
 * A node stands for a folder, a file or a link. It stays a valid pointer after that
 * is gone: every call on it then fails with ESTALE. Nodes need no opening: reads and
 * writes open what they need, and idle files are closed, which makes their writes
 * durable. An open keeps a file open.
 */

#ifndef COLDRISE_FOLDERS_H
#define COLDRISE_FOLDERS_H

#include "coldrise.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A repository, opened for serving as folders. */
typedef struct coldrise_folders coldrise_folders;

/* A folder, a file or a link in it. Many threads may use it at once; only its release
 * must come after all other calls on it.
 */
typedef struct coldrise_node coldrise_node;

/* Opens the repository at `path`; see coldrise_repository_open, errno included.
 * `mounted_at` is the folder under which clients see the root, or NULL: a qcow2 image
 * with an external data file names that file by its absolute path. Without the flag
 * COLDRISE_FOLDERS_READ_ONLY sessions are writable. A file without an open is closed
 * after `idle_ms` milliseconds without use.
 */
#define COLDRISE_FOLDERS_READ_ONLY (1u << 0)

int coldrise_folders_open (const char *path,
                           const struct coldrise_options *options,
                           const char *mounted_at, uint32_t idle_ms,
                           uint32_t flags, coldrise_folders **folders);

/* Flushes and closes every file. Calls on remaining nodes then fail with ESTALE; they
 * must still be released. NULL is allowed.
 */
void coldrise_folders_close (coldrise_folders *folders);

/* Receives the handle of a session's file: the host must discard its cached
 * attributes before it returns. A thread of the library calls it some moments after
 * the host asked for the attributes. It may call every function except
 * coldrise_folders_watch.
 */
typedef void coldrise_forget_callback (void *context, const void *handle,
                                       size_t length);

/* Sets the callback that invalidates attributes, so that the host may cache them;
 * NULL: none. On return no call of the previous callback is running.
 */
void coldrise_folders_watch (const coldrise_folders *folders,
                             coldrise_forget_callback *callback,
                             void *context);

/* Space on the repository's file system, in bytes. */
struct coldrise_space {
  uint64_t total_bytes;
  uint64_t free_bytes;
  uint64_t available_bytes; /* the part that users other than root can fill */
};

int coldrise_folders_space (const coldrise_folders *folders,
                            struct coldrise_space *space);

/* Nodes */

/* The root folder. */
int coldrise_node_root (const coldrise_folders *folders, coldrise_node **node);

/* The node of that name in a folder. errno: ENOENT, ENOTDIR, ESTALE. */
int coldrise_node_find (const coldrise_node *folder, const char *name,
                        coldrise_node **node);

/* The folder of a node; for the root the root itself. */
int coldrise_node_parent (const coldrise_node *node, coldrise_node **parent);

/* Releases a node. NULL is allowed. */
void coldrise_node_release (coldrise_node *node);

/* Maximum length of a handle. */
#define COLDRISE_HANDLE_MAX 32

/* Writes the node's handle for clients into `handle`, which must hold
 * COLDRISE_HANDLE_MAX bytes, and returns its length. The same node has the same
 * handle in every process and after every restart, and no other node ever gets it.
 */
int coldrise_node_handle (const coldrise_node *node, void *handle);

/* The node of a handle. errno: ESTALE if it is gone (or never existed), EINVAL for
 * bytes that are not a handle.
 */
int coldrise_node_of_handle (const coldrise_folders *folders,
                             const void *handle, size_t length,
                             coldrise_node **node);

/* Receives one entry and owns its node from here on. `cookie` is the position behind
 * this entry. A return value other than 0 ends the listing.
 */
typedef int coldrise_entry_callback (void *context, const char *name,
                                     coldrise_node *node, uint64_t cookie);

/* Lists a folder from a cookie on; 0 is its start. Cookies are at least 3 and below
 * 2^63, stay the same over restarts, and entries come in their order: additions and
 * removals during a listing neither repeat nor hide another entry. Returns 1 at the
 * folder's end, 0 if the callback ended the listing.
 */
int coldrise_node_list (const coldrise_node *folder, uint64_t after,
                        coldrise_entry_callback *callback, void *context);

enum coldrise_node_type {
  COLDRISE_NODE_FOLDER = 1,
  COLDRISE_NODE_FILE = 2,
  COLDRISE_NODE_LINK = 3,
};

enum coldrise_node_type coldrise_node_type (const coldrise_node *node);

/* File id of the node; never 0, the root's is 1. */
uint64_t coldrise_node_id (const coldrise_node *node);

/* Its address, such as "web01/20261120T100000Z/vda.raw". Valid until its release. */
const char *coldrise_node_path (const coldrise_node *node);

struct coldrise_attributes {
  uint64_t size_bytes;
  uint64_t stored_bytes;
  int64_t modified_s;   /* last change of the content, since 1970 */
  int64_t changed_s;    /* last change of content, mode or name */
  uint64_t change;      /* differs after every change */
  uint32_t modified_ns; /* a folder's differs whenever its entries do */
  uint32_t changed_ns;
  uint32_t mode;        /* permissions */
  uint32_t valid_s;     /* time for which the host may cache them, for a session's file
                           at most until coldrise_forget_callback; 0: not at all */
  uint32_t has_verifier;
  uint8_t verifier[8];  /* of an exclusive creation, until the first write or the first
                           change of mode or time */
};

int coldrise_node_attributes (const coldrise_node *node,
                              struct coldrise_attributes *attributes);

/* The target of a link, a name in the link's own folder; `target` must hold
 * COLDRISE_NAME_MAX bytes.
 */
int coldrise_node_target (const coldrise_node *link, char *target);

/* Files. On read-only files all changes fail with EROFS, on a session's own files
 * with EACCES. EBUSY: another process writes the session; the message names it.
 */

/* The access of an open, and what it denies to all other opens. A deny applies to
 * content: all images of a session's disk are one disk.
 */
#define COLDRISE_SHARE_READ       (1u << 0)
#define COLDRISE_SHARE_WRITE      (1u << 1)
#define COLDRISE_SHARE_DENY_READ  (1u << 2)
#define COLDRISE_SHARE_DENY_WRITE (1u << 3)

/* Keeps the file open: until its close no other process can end the session or, for a
 * writing open, write it. Close each open with the same share. errno: ETXTBSY,
 * another open denies it.
 */
int coldrise_node_open (const coldrise_node *file, uint32_t share);
void coldrise_node_close (const coldrise_node *file, uint32_t share);

/* Changes the share of an open. Its own deny counts, too; a reduced share is always
 * granted. After a failure the open is unchanged. errno: ETXTBSY.
 */
int coldrise_node_reopen (const coldrise_node *file, uint32_t held,
                          uint32_t share);

/* Checks whether a read or write without an open is allowed. errno: ETXTBSY. */
int coldrise_node_check_share (const coldrise_node *file, uint32_t share);

/* Moves the opens of `other`, another node of the same file that is about to be
 * released, to `file`, which then closes them.
 */
int coldrise_node_take_over (const coldrise_node *file,
                             const coldrise_node *other);

/* Fails if a write would fail; changes nothing. */
int coldrise_node_check_writable (const coldrise_node *file);

/* Fills `buffer` up to the file's end. `is_end` becomes 1 if the read reached the
 * end.
 */
int coldrise_node_read (const coldrise_node *file, void *buffer, size_t length,
                        uint64_t offset, int flags, size_t *filled,
                        int *is_end);

/* A flag: a read that would open, decode, or read from a drive fails with EAGAIN
 * instead.
 */
#define COLDRISE_READ_IN_MEMORY (1 << 0)

/* Writes; durable after the next flush. EFBIG: behind the end of a file that cannot
 * grow.
 */
int coldrise_node_write (const coldrise_node *file, const void *buffer,
                         size_t length, uint64_t offset);

/* 1 if a write would have to open the file, or to read the unchanged part of a block
 * from a drive; else 0.
 */
int coldrise_node_write_waits (const coldrise_node *file, size_t length,
                               uint64_t offset);

/* Work that waits, on threads of the library. The numbers of threads and of waiting
 * tasks are bounded. errno: EAGAIN if the queue is full; the caller then does the work
 * itself. Do not release the file before the callback.
 */
typedef void coldrise_task_callback (void *context);
typedef void coldrise_done_callback (void *context, int result);

/* Runs `task`. */
int coldrise_node_run_later (const coldrise_node *file,
                             coldrise_task_callback *task, void *context);

/* coldrise_node_flush, shared with all other calls on this file that come in time;
 * `result` is its return value, with its errno and its message.
 */
int coldrise_node_flush_later (const coldrise_node *file,
                               coldrise_done_callback *done, void *context);

/* Makes every write to the file durable that completed before the call; for an image
 * also those through all other images of its disk. Concurrent calls share the work.
 * After EIO, or if the session has stopped, the process must end: unflushed writes
 * may be lost, and clients send them again only to another process with another write
 * verifier.
 */
int coldrise_node_flush (const coldrise_node *file);

/* 1 if a failure has stopped the session of a file that is open for writing, else 0.
 */
int coldrise_node_has_stopped (const coldrise_node *file);

/* Lengthens or shortens a file. EOPNOTSUPP if the disk determines the size. */
int coldrise_node_set_size (const coldrise_node *file, uint64_t size);

/* Client files in a session's folder, next to its disks. These calls are durable on
 * return, and keep the session open until it was idle for a while. errno, besides
 * EROFS, EACCES (also for the names of the session's own files) and EBUSY as above:
 * EINVAL and ENAMETOOLONG for invalid names, ENOTDIR, ENOSPC (also if the session
 * already holds the maximum number of files).
 */

enum coldrise_creation {
  COLDRISE_CREATE_UNCHECKED = 1, /* opens an existing file */
  COLDRISE_CREATE_GUARDED = 2,   /* fails if the file exists */
  COLDRISE_CREATE_EXCLUSIVE = 3, /* the same, except for a file with the same verifier */
};

/* Makes an empty file; for an exclusive creation `verifier` holds 8 bytes. errno:
 * EEXIST, EISDIR.
 */
int coldrise_node_create (const coldrise_node *folder, const char *name,
                          int how, const void *verifier, uint32_t mode,
                          coldrise_node **node);

/* Makes a folder. errno: EEXIST. */
int coldrise_node_make_folder (const coldrise_node *folder, const char *name,
                               uint32_t mode, coldrise_node **node);

/* Removes a file, even if it is open, or an empty folder. errno: ENOENT, ENOTEMPTY.
 */
int coldrise_node_remove (const coldrise_node *folder, const char *name);

/* Renames a file or folder, and atomically replaces a file or empty folder of the new
 * name. errno: ENOENT, EISDIR, ENOTDIR, ENOTEMPTY, EXDEV between sessions.
 */
int coldrise_node_rename (const coldrise_node *folder, const char *name,
                          const coldrise_node *new_folder, const char *new_name);

#define COLDRISE_CHANGE_MODE     (1u << 0)
#define COLDRISE_CHANGE_MODIFIED (1u << 1)

struct coldrise_changes {
  uint32_t what; /* the fields to set: COLDRISE_CHANGE_* */
  uint32_t mode;
  int64_t modified_s;
  uint32_t modified_ns;
};

/* Sets the modification time and the permissions; permissions are shown to clients
 * and not enforced. On other files than clients' it succeeds without effect.
 */
int coldrise_node_change (const coldrise_node *node,
                          const struct coldrise_changes *changes);

#ifdef __cplusplus
}
#endif

#endif /* COLDRISE_FOLDERS_H */
