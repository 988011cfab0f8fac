/* Does over NFSv3 what ESXi does to a datastore: two hosts, each with a connection.
 *
 *   client SERVER EXPORT SESSION      SESSION: the name of a folder in EXPORT/live
 *
 * The order of calls, their sizes and their flags are ESXi's. Ends with 0 where every
 * answer was the one that ESXi needs; else says which was not. It leaves vm.vmx, and in
 * the session's vda-flat.vmdk FLAT_WRITES blocks from FLAT_OFFSET on, the n-th of the byte n.
 */

#include <inttypes.h>
#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <nfsc/libnfs.h>
#include <nfsc/libnfs-raw.h>
#include <nfsc/libnfs-raw-mount.h>
#include <nfsc/libnfs-raw-nfs.h>
#include <nfsc/libnfs-raw-portmap.h>

#define TCP 6
#define TIMEOUT_MS 60000
/* Largest handle that ESXi takes. */
#define MOST_HANDLE 56
/* ESXi's reads of a small file of any size. */
#define SMALL_READ 0x200
#define LOCK_BYTES 84
#define HEARTBEATS 20
#define FLAT_WRITES 64
#define FLAT_BLOCK 4096
#define FLAT_OFFSET (1 << 20)

#define CHECK(condition)                                                     \
  do {                                                                       \
    if (!(condition)) {                                                      \
      fprintf (stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      exit (1);                                                              \
    }                                                                        \
  } while (0)

struct handle {
  nfs_fh3 fh;
  char bytes[MOST_HANDLE];
};

/* Of one call. What the library hands over is valid in the call back only. */
struct answer {
  int pending;      /* calls without an answer */
  int status;       /* of NFS, -1 where there was no answer */
  uint64_t fileid, size;
  bool is_end;
  uint32_t count, most;
  char data[SMALL_READ];
  char verifier[NFS3_WRITEVERFSIZE];
  int committed;
  struct handle handle;
};

static void
await (struct rpc_context *rpc, struct answer *answer)
{
  while (answer->pending > 0) {
    struct pollfd poller = { .fd = rpc_get_fd (rpc),
                             .events = rpc_which_events (rpc) };
    CHECK (poll (&poller, 1, TIMEOUT_MS) > 0);
    CHECK (rpc_service (rpc, poller.revents) == 0);
  }
}

/* Calls, waits, and gives NFS's status. */
#define CALL(rpc, function, callback, args, answer)                          \
  ((answer)->pending = 1, (answer)->status = -1,                             \
   CHECK_SENT (function (rpc, callback, args, answer)), await (rpc, answer), \
   (answer)->status)

static int
CHECK_SENT (int result)
{
  CHECK (result == 0);
  return result;
}

static struct answer *
answered (int status, void *private_data)
{
  struct answer *answer = private_data;

  CHECK (status == RPC_STATUS_SUCCESS);
  answer->pending--;
  return answer;
}

static void
keep (struct handle *handle, const nfs_fh3 *fh)
{
  CHECK (fh->data.data_len > 0 && fh->data.data_len <= MOST_HANDLE);
  memcpy (handle->bytes, fh->data.data_val, fh->data.data_len);
  handle->fh.data.data_len = fh->data.data_len;
  handle->fh.data.data_val = handle->bytes;
}

/* A copy points to its own bytes. */
static struct handle *
own (struct handle *handle)
{
  handle->fh.data.data_val = handle->bytes;
  return handle;
}

static bool
is_same (const struct handle *one, const struct handle *other)
{
  return one->fh.data.data_len == other->fh.data.data_len
         && memcmp (one->bytes, other->bytes, one->fh.data.data_len) == 0;
}

static void
on_port (struct rpc_context *rpc, int status, void *data, void *private_data)
{
  (void) rpc;
  answered (status, private_data)->most = *(uint32_t *) data;
}

static void
on_connected (struct rpc_context *rpc, int status, void *data,
              void *private_data)
{
  (void) rpc;
  (void) data;
  answered (status, private_data);
}

static void
on_mounted (struct rpc_context *rpc, int status, void *data,
            void *private_data)
{
  struct answer *answer = answered (status, private_data);
  mountres3 *result = data;
  nfs_fh3 fh;

  (void) rpc;
  answer->status = result->fhs_status;
  if (answer->status != MNT3_OK)
    return;
  fh.data.data_len = result->mountres3_u.mountinfo.fhandle.fhandle3_len;
  fh.data.data_val = result->mountres3_u.mountinfo.fhandle.fhandle3_val;
  keep (&answer->handle, &fh);
}

static void
on_fsinfo (struct rpc_context *rpc, int status, void *data, void *private_data)
{
  struct answer *answer = answered (status, private_data);
  FSINFO3res *result = data;
  FSINFO3resok *ok = &result->FSINFO3res_u.resok;

  (void) rpc;
  answer->status = result->status;
  if (answer->status == NFS3_OK)
    answer->most = ok->rtmax < ok->wtmax ? ok->rtmax : ok->wtmax;
}

static void
on_fsstat (struct rpc_context *rpc, int status, void *data, void *private_data)
{
  struct answer *answer = answered (status, private_data);
  FSSTAT3res *result = data;

  (void) rpc;
  answer->status = result->status;
  if (answer->status == NFS3_OK)
    answer->size = result->FSSTAT3res_u.resok.abytes;
}

static void
on_pathconf (struct rpc_context *rpc, int status, void *data,
             void *private_data)
{
  struct answer *answer = answered (status, private_data);
  PATHCONF3res *result = data;

  (void) rpc;
  answer->status = result->status;
  if (answer->status == NFS3_OK && result->PATHCONF3res_u.resok.no_trunc)
    answer->most = result->PATHCONF3res_u.resok.name_max;
}

static void
on_getattr (struct rpc_context *rpc, int status, void *data,
            void *private_data)
{
  struct answer *answer = answered (status, private_data);
  GETATTR3res *result = data;

  (void) rpc;
  answer->status = result->status;
  if (answer->status != NFS3_OK)
    return;
  answer->fileid = result->GETATTR3res_u.resok.obj_attributes.fileid;
  answer->size = result->GETATTR3res_u.resok.obj_attributes.size;
}

static void
on_lookup (struct rpc_context *rpc, int status, void *data, void *private_data)
{
  struct answer *answer = answered (status, private_data);
  LOOKUP3res *result = data;

  (void) rpc;
  answer->status = result->status;
  if (answer->status == NFS3_OK)
    keep (&answer->handle, &result->LOOKUP3res_u.resok.object);
}

static void
on_create (struct rpc_context *rpc, int status, void *data, void *private_data)
{
  struct answer *answer = answered (status, private_data);
  CREATE3res *result = data;
  CREATE3resok *ok = &result->CREATE3res_u.resok;

  (void) rpc;
  answer->status = result->status;
  if (answer->status != NFS3_OK)
    return;
  CHECK (ok->obj.handle_follows);
  keep (&answer->handle, &ok->obj.post_op_fh3_u.handle);
}

static void
on_rename (struct rpc_context *rpc, int status, void *data, void *private_data)
{
  (void) rpc;
  answered (status, private_data)->status = ((RENAME3res *) data)->status;
}

static void
on_remove (struct rpc_context *rpc, int status, void *data, void *private_data)
{
  (void) rpc;
  answered (status, private_data)->status = ((REMOVE3res *) data)->status;
}

static void
on_read (struct rpc_context *rpc, int status, void *data, void *private_data)
{
  struct answer *answer = answered (status, private_data);
  READ3res *result = data;
  READ3resok *ok = &result->READ3res_u.resok;

  (void) rpc;
  answer->status = result->status;
  if (answer->status != NFS3_OK)
    return;
  CHECK (ok->data.data_len <= sizeof answer->data);
  answer->count = ok->data.data_len;
  answer->is_end = ok->eof;
  memcpy (answer->data, ok->data.data_val, ok->data.data_len);
}

/* Many may be under way: each has to tell the same. */
static void
on_write (struct rpc_context *rpc, int status, void *data, void *private_data)
{
  struct answer *answer = answered (status, private_data);
  WRITE3res *result = data;
  WRITE3resok *ok = &result->WRITE3res_u.resok;

  (void) rpc;
  answer->status = result->status;
  if (answer->status != NFS3_OK)
    return;
  CHECK (ok->committed == FILE_SYNC);
  CHECK (answer->committed == 0
         || memcmp (answer->verifier, ok->verf, sizeof ok->verf) == 0);
  memcpy (answer->verifier, ok->verf, sizeof ok->verf);
  answer->committed++;
}

/* A connection to one program: it asks the port mapper where that is. */
static struct rpc_context *
connect_to (const char *server, int program)
{
  struct answer answer = { .pending = 1 };
  struct rpc_context *rpc = rpc_init_context ();

  CHECK (rpc != NULL);
  rpc_set_uid (rpc, 0);
  CHECK_SENT (rpc_connect_program_async (rpc, server, program, 3,
                                         on_connected, &answer));
  await (rpc, &answer);
  return rpc;
}

static void
check_ports (const char *server)
{
  static const int programs[] = { MOUNT_PROGRAM, NFS_PROGRAM };
  struct answer answer = { .pending = 1 };
  struct rpc_context *rpc = rpc_init_context ();

  CHECK_SENT (rpc_connect_async (rpc, server, PMAP_PORT, on_connected,
                                 &answer));
  await (rpc, &answer);
  for (size_t i = 0; i < sizeof programs / sizeof *programs; i++) {
    answer.pending = 1;
    CHECK_SENT (rpc_pmap2_getport_async (rpc, programs[i], 3, TCP, on_port,
                                         &answer));
    await (rpc, &answer);
    CHECK (answer.most != 0);
  }
  rpc_destroy_context (rpc);
}

static struct handle
lookup (struct rpc_context *rpc, struct handle folder, const char *name)
{
  struct answer answer = { 0 };
  LOOKUP3args args = { .what = { own (&folder)->fh, (char *) name } };

  CHECK (CALL (rpc, rpc_nfs3_lookup_async, on_lookup, &args, &answer)
         == NFS3_OK);
  return answer.handle;
}

static int
create (struct rpc_context *rpc, struct handle folder, const char *name,
        createmode3 mode, struct handle *made)
{
  struct answer answer = { 0 };
  CREATE3args args = { .where = { own (&folder)->fh, (char *) name },
                       .how = { .mode = mode } };
  int status = CALL (rpc, rpc_nfs3_create_async, on_create, &args, &answer);

  *made = answer.handle;
  return status;
}

static int
getattr (struct rpc_context *rpc, struct handle file, struct answer *answer)
{
  GETATTR3args args = { .object = own (&file)->fh };

  return CALL (rpc, rpc_nfs3_getattr_async, on_getattr, &args, answer);
}

static int
write_stable (struct rpc_context *rpc, struct handle file, uint64_t offset,
              const void *bytes, size_t length)
{
  struct answer answer = { 0 };
  WRITE3args args = { .file = own (&file)->fh, .offset = offset,
                      .count = length, .stable = FILE_SYNC,
                      .data = { length, (char *) bytes } };

  return CALL (rpc, rpc_nfs3_write_async, on_write, &args, &answer);
}

static void
read_small (struct rpc_context *rpc, struct handle file,
            struct answer *answer)
{
  READ3args args = { .file = own (&file)->fh, .count = SMALL_READ };

  CHECK (CALL (rpc, rpc_nfs3_read_async, on_read, &args, answer) == NFS3_OK);
}

static int
remove_file (struct rpc_context *rpc, struct handle folder, const char *name)
{
  struct answer answer = { 0 };
  REMOVE3args args = { .object = { own (&folder)->fh, (char *) name } };

  return CALL (rpc, rpc_nfs3_remove_async, on_remove, &args, &answer);
}

static int
rename_file (struct rpc_context *rpc, struct handle folder, const char *name,
             const char *new_name)
{
  struct answer answer = { 0 };
  nfs_fh3 fh = own (&folder)->fh;
  RENAME3args args = { .from = { fh, (char *) name },
                       .to = { fh, (char *) new_name } };

  return CALL (rpc, rpc_nfs3_rename_async, on_rename, &args, &answer);
}

static struct handle
mount (const char *server, const char *export)
{
  struct rpc_context *rpc = connect_to (server, MOUNT_PROGRAM);
  struct answer answer = { 0 };

  CHECK (CALL (rpc, rpc_mount3_mnt_async, on_mounted, (char *) export, &answer)
         == MNT3_OK);
  rpc_destroy_context (rpc);
  return answer.handle;
}

/* Requests that are sent once, when the datastore is added. */
static void
check_datastore (struct rpc_context *host, struct handle root)
{
  struct answer answer = { 0 };
  FSINFO3args fsinfo = { .fsroot = own (&root)->fh };
  FSSTAT3args fsstat = { .fsroot = root.fh };
  PATHCONF3args pathconf = { .object = root.fh };

  CHECK (CALL (host, rpc_nfs3_fsinfo_async, on_fsinfo, &fsinfo, &answer)
         == NFS3_OK);
  CHECK (answer.most >= 64 << 10);
  CHECK (CALL (host, rpc_nfs3_fsstat_async, on_fsstat, &fsstat, &answer)
         == NFS3_OK);
  CHECK (answer.size > 0);
  CHECK (CALL (host, rpc_nfs3_pathconf_async, on_pathconf, &pathconf, &answer)
         == NFS3_OK);
  CHECK (answer.most == 255);
}

/* One host locks a file and says again and again that it lives; the other one sees it. */
static struct handle
check_lock (struct rpc_context *host, struct rpc_context *other,
            struct handle folder, const char *name)
{
  struct handle lock, refused, found;
  struct answer answer = { 0 };
  char content[LOCK_BYTES] = "host1";

  CHECK (create (host, folder, name, GUARDED, &lock) == NFS3_OK);
  CHECK (write_stable (host, lock, 0, content, sizeof content) == NFS3_OK);
  CHECK (create (other, folder, name, GUARDED, &refused) == NFS3ERR_EXIST);
  found = lookup (other, folder, name);
  CHECK (is_same (&found, &lock));
  CHECK (getattr (other, found, &answer) == NFS3_OK
         && answer.size == LOCK_BYTES);
  for (uint32_t beat = 1; beat <= HEARTBEATS; beat++) {
    memcpy (content + 5, &beat, sizeof beat);
    CHECK (write_stable (host, lock, 5, &beat, sizeof beat) == NFS3_OK);
    read_small (other, found, &answer);
    CHECK (answer.count == LOCK_BYTES && answer.is_end);
    CHECK (memcmp (answer.data, content, LOCK_BYTES) == 0);
  }
  return lock;
}

/* A configuration is written to a new file and renamed over the old one. */
static void
check_configuration (struct rpc_context *host, struct rpc_context *other,
                     struct handle folder)
{
  static const char old_text[] = "memsize = \"96\"\n";
  static const char new_text[] = "memsize = \"128\"\nnumvcpus = \"2\"\n";
  const size_t old_length = sizeof old_text - 1;
  const size_t new_length = sizeof new_text - 1;
  struct handle old, new, found;
  struct answer answer = { 0 };

  CHECK (create (host, folder, "vm.vmx", UNCHECKED, &old) == NFS3_OK);
  CHECK (write_stable (host, old, 0, old_text, old_length) == NFS3_OK);
  CHECK (create (host, folder, "vm.vmx~", GUARDED, &new) == NFS3_OK);
  CHECK (getattr (other, new, &answer) == NFS3_OK && answer.size == 0);
  CHECK (write_stable (host, new, 0, new_text, new_length) == NFS3_OK);
  CHECK (getattr (other, new, &answer) == NFS3_OK
         && answer.size == new_length);
  CHECK (rename_file (host, folder, "vm.vmx~", "vm.vmx") == NFS3_OK);
  found = lookup (other, folder, "vm.vmx");
  CHECK (is_same (&found, &new));
  read_small (other, found, &answer);
  CHECK (answer.count == new_length && answer.is_end);
  CHECK (memcmp (answer.data, new_text, new_length) == 0);
  CHECK (getattr (other, old, &answer) == NFS3ERR_STALE);
}

/* A guest's writes: many at a time, each stable. */
static void
check_flat_writes (struct rpc_context *host, struct handle flat)
{
  static char blocks[FLAT_WRITES][FLAT_BLOCK];
  struct answer answer = { .pending = FLAT_WRITES };

  for (int i = 0; i < FLAT_WRITES; i++) {
    WRITE3args args = { .file = own (&flat)->fh,
                        .offset = FLAT_OFFSET + (uint64_t) i * FLAT_BLOCK,
                        .count = FLAT_BLOCK, .stable = FILE_SYNC,
                        .data = { FLAT_BLOCK, blocks[i] } };

    memset (blocks[i], i, FLAT_BLOCK);
    CHECK_SENT (rpc_nfs3_write_async (host, on_write, &args, &answer));
  }
  await (host, &answer);
  CHECK (answer.status == NFS3_OK && answer.committed == FLAT_WRITES);
}

int
main (int argc, char **argv)
{
  struct rpc_context *host, *other;
  struct handle root, folder, flat, lock;
  struct answer answer = { 0 };
  uint64_t fileid;
  char name[64];

  if (argc != 4) {
    fprintf (stderr, "usage: %s SERVER EXPORT SESSION\n", argv[0]);
    return 2;
  }
  check_ports (argv[1]);
  root = mount (argv[1], argv[2]);
  host = connect_to (argv[1], NFS_PROGRAM);
  other = connect_to (argv[1], NFS_PROGRAM);
  check_datastore (host, root);

  folder = lookup (host, lookup (host, root, "live"), argv[3]);
  flat = lookup (host, folder, "vda-flat.vmdk");
  CHECK (getattr (host, flat, &answer) == NFS3_OK);
  fileid = answer.fileid;
  /* Locks are named by what they lock. */
  snprintf (name, sizeof name, ".lck-%016" PRIx64, fileid);

  lock = check_lock (host, other, folder, name);
  check_configuration (host, other, folder);
  check_flat_writes (host, flat);
  CHECK (getattr (other, flat, &answer) == NFS3_OK
         && answer.fileid == fileid);

  CHECK (remove_file (host, folder, name) == NFS3_OK);
  CHECK (getattr (other, lock, &answer) == NFS3ERR_STALE);
  CHECK (write_stable (host, lock, 0, "x", 1) == NFS3ERR_STALE);
  rpc_destroy_context (host);
  rpc_destroy_context (other);
  return 0;
}
