/* FSAL_COLDRISE: reading, writing, committing.
 *
 * Answers from memory immediately: another thread costs more than a read.
 * Requests that wait run on a thread of the library (docs/decisions/0016).
 */

#include "fsal_coldrise.h"

#include <sysexits.h>

/* After a failed sync unflushed writes may be lost. Clients still have them
 * and send them again when the write verifier changes; NFSv3's is bound to
 * the process. So this process ends, and its parent starts another.
 */
static void end_process(struct coldrise_fsal_handle *handle)
{
	LogCrit(COMPONENT_FSAL,
		"%s: %s; nfs-ganesha ends: its successor has a new write verifier, so clients send unflushed data again",
		coldrise_node_path(handle->node), coldrise_last_error());
	_exit(EX_TEMPFAIL);
}

/* The status of a flush. */
static fsal_status_t flush_status(struct coldrise_fsal_handle *handle,
				  int result)
{
	if (result == 0)
		return fsalstat(ERR_FSAL_NO_ERROR, 0);
	if (errno == EIO)
		end_process(handle);
	if (errno == ENOSPC) {
		/* Writes to a disk may be lost; a client's file is still in
		 * memory and can be stored later.
		 */
		fsal_status_t status =
			coldrise_failed(coldrise_node_path(handle->node));

		if (coldrise_node_has_stopped(handle->node))
			end_process(handle);
		return status;
	}
	return coldrise_failed(coldrise_node_path(handle->node));
}

fsal_status_t coldrise_flush(struct coldrise_fsal_handle *handle)
{
	return flush_status(handle, coldrise_node_flush(handle->node));
}

fsal_status_t coldrise_check_share(struct coldrise_fsal_handle *handle,
				   bool bypass, struct state_t *state,
				   fsal_openflags_t flags)
{
	bool for_writing = (flags & FSAL_O_WRITE) != 0;

	if (handle->obj.type != REGULAR_FILE)
		return fsalstat(ERR_FSAL_INVAL, EINVAL);
	if (state == NULL && (for_writing || !bypass)
	    && coldrise_node_check_share(handle->node, for_writing
				? COLDRISE_SHARE_WRITE
				: COLDRISE_SHARE_READ) == -1)
		return coldrise_failed(coldrise_node_path(handle->node));
	return fsalstat(ERR_FSAL_NO_ERROR, 0);
}

/* A request that waits on a thread of the library. Its arguments stay valid
 * until done_cb, references to the object and the export included.
 */
struct waiting {
	struct fsal_obj_handle *obj;
	fsal_async_cb done_cb;
	struct fsal_io_arg *arg;
	void *caller_arg;
	struct gsh_export *ctx_export;
	struct fsal_export *fsal_export;
};

static struct waiting *new_waiting(struct fsal_obj_handle *obj,
				   fsal_async_cb done_cb,
				   struct fsal_io_arg *arg, void *caller_arg)
{
	struct waiting *waiting = gsh_malloc(sizeof(*waiting));

	waiting->obj = obj;
	waiting->done_cb = done_cb;
	waiting->arg = arg;
	waiting->caller_arg = caller_arg;
	waiting->ctx_export = op_ctx->ctx_export;
	waiting->fsal_export = op_ctx->fsal_export;
	return waiting;
}

/* Answers in a context of its own: the request's context still belongs to its
 * thread, or waits with the request.
 */
static void answer(struct waiting *waiting, fsal_status_t status)
{
	struct req_op_context context;

	get_gsh_export_ref(waiting->ctx_export);
	init_op_context_simple(&context, waiting->ctx_export,
			       waiting->fsal_export);
	waiting->done_cb(waiting->obj, status, waiting->arg,
			 waiting->caller_arg);
	release_op_context();
	gsh_free(waiting);
}

/* Returns false if COLDRISE_READ_IN_MEMORY is set and the read would wait. */
static bool read_all(struct coldrise_fsal_handle *handle,
		     struct fsal_io_arg *arg, int flags, fsal_status_t *status)
{
	uint64_t offset = arg->offset;
	int is_end = 0;
	int i;

	arg->io_amount = 0;
	*status = fsalstat(ERR_FSAL_NO_ERROR, 0);
	for (i = 0; i < arg->iov_count && !is_end; i++) {
		size_t filled = 0;

		if (coldrise_node_read(handle->node, arg->iov[i].iov_base,
				       arg->iov[i].iov_len, offset, flags,
				       &filled, &is_end) == -1) {
			if (flags != 0 && errno == EAGAIN)
				return false;
			*status =
			     coldrise_failed(coldrise_node_path(handle->node));
			break;
		}
		arg->io_amount += filled;
		offset += filled;
	}
	arg->end_of_file = is_end;
	return true;
}

static void read_waiting(void *context)
{
	struct waiting *waiting = context;
	fsal_status_t status;

	read_all(coldrise_handle(waiting->obj), waiting->arg, 0, &status);
	answer(waiting, status);
}

static void read2(struct fsal_obj_handle *obj, bool bypass,
		  fsal_async_cb done_cb, struct fsal_io_arg *arg,
		  void *caller_arg)
{
	struct coldrise_fsal_handle *handle = coldrise_handle(obj);
	struct waiting *waiting;
	fsal_status_t status;

	/* READ_PLUS and SEEK belong to NFSv4.2. */
	if (arg->info != NULL) {
		done_cb(obj, fsalstat(ERR_FSAL_NOTSUPP, 0), arg, caller_arg);
		return;
	}

	status = coldrise_check_share(handle, bypass, arg->state, FSAL_O_READ);
	if (!FSAL_IS_ERROR(status)
	    && !read_all(handle, arg, COLDRISE_READ_IN_MEMORY, &status)) {
		waiting = new_waiting(obj, done_cb, arg, caller_arg);
		if (coldrise_node_run_later(handle->node, read_waiting,
					    waiting) == 0)
			return;
		/* No space for another waiting request. */
		gsh_free(waiting);
		read_all(handle, arg, 0, &status);
	}
	done_cb(obj, status, arg, caller_arg);
}

/* Between another request's failed sync and the end of this process, writes
 * fail, too: their clients have to send them again, and must not see errors.
 */
static fsal_status_t write_failed(struct coldrise_fsal_handle *handle)
{
	fsal_status_t status = coldrise_failed(
					coldrise_node_path(handle->node));

	if (coldrise_node_has_stopped(handle->node))
		end_process(handle);
	return status;
}

static fsal_status_t write_all(struct coldrise_fsal_handle *handle,
			       struct fsal_io_arg *arg)
{
	uint64_t offset = arg->offset;
	int i;

	arg->io_amount = 0;
	for (i = 0; i < arg->iov_count; i++) {
		if (coldrise_node_write(handle->node, arg->iov[i].iov_base,
					arg->iov[i].iov_len, offset) == -1)
			return write_failed(handle);
		arg->io_amount += arg->iov[i].iov_len;
		offset += arg->iov[i].iov_len;
	}
	return fsalstat(ERR_FSAL_NO_ERROR, 0);
}

static void flushed(void *context, int result)
{
	struct waiting *waiting = context;

	answer(waiting, flush_status(coldrise_handle(waiting->obj), result));
}

static void write_waiting(void *context)
{
	struct waiting *waiting = context;
	struct coldrise_fsal_handle *handle = coldrise_handle(waiting->obj);
	fsal_status_t status = write_all(handle, waiting->arg);

	if (!FSAL_IS_ERROR(status) && waiting->arg->fsal_stable) {
		if (coldrise_node_flush_later(handle->node, flushed,
					      waiting) == 0)
			return;
		status = coldrise_flush(handle);
	}
	answer(waiting, status);
}

/* A write goes to the page cache at once, with two exceptions: one that must
 * read the rest of a block waits for the read, and a stable one waits for its
 * sync, which it shares with all others that come in time.
 */
static void write2(struct fsal_obj_handle *obj, bool bypass,
		   fsal_async_cb done_cb, struct fsal_io_arg *arg,
		   void *caller_arg)
{
	struct coldrise_fsal_handle *handle = coldrise_handle(obj);
	struct waiting *waiting;
	fsal_status_t status;
	size_t length = 0;
	int i;

	status = coldrise_check_share(handle, bypass, arg->state, FSAL_O_WRITE);
	if (FSAL_IS_ERROR(status))
		goto out;

	for (i = 0; i < arg->iov_count; i++)
		length += arg->iov[i].iov_len;
	if (coldrise_node_write_waits(handle->node, length, arg->offset) == 1) {
		waiting = new_waiting(obj, done_cb, arg, caller_arg);
		if (coldrise_node_run_later(handle->node, write_waiting,
					    waiting) == 0)
			return;
		gsh_free(waiting);
	}

	status = write_all(handle, arg);
	if (!FSAL_IS_ERROR(status) && arg->fsal_stable) {
		waiting = new_waiting(obj, done_cb, arg, caller_arg);
		if (coldrise_node_flush_later(handle->node, flushed,
					      waiting) == 0)
			return;
		gsh_free(waiting);
		status = coldrise_flush(handle);
	}
out:
	done_cb(obj, status, arg, caller_arg);
}

/* nfs-ganesha 4.3 cannot answer a commit later. Commits of several clients
 * still share syncs.
 */
static fsal_status_t commit2(struct fsal_obj_handle *obj, off_t offset,
			     size_t len)
{
	(void) offset;
	(void) len;
	return coldrise_flush(coldrise_handle(obj));
}

void coldrise_io_ops_init(struct fsal_obj_ops *ops)
{
	ops->read2 = read2;
	ops->write2 = write2;
	ops->commit2 = commit2;
}
