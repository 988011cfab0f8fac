/* FSAL_COLDRISE: opening, sizes, modes and times.
 *
 * An open keeps its node open. Requests without an open (all of NFSv3) need
 * none: the library closes idle files. So a state holds only its open flags.
 */

#include "fsal_coldrise.h"

static struct fsal_fd *state_fd(struct state_t *state)
{
	return (struct fsal_fd *)(state + 1);
}

static uint32_t share_of(fsal_openflags_t flags)
{
	uint32_t share = 0;

	if (flags & FSAL_O_READ)
		share |= COLDRISE_SHARE_READ;
	if (flags & FSAL_O_WRITE)
		share |= COLDRISE_SHARE_WRITE;
	if (flags & FSAL_O_DENY_READ)
		share |= COLDRISE_SHARE_DENY_READ;
	if (flags & (FSAL_O_DENY_WRITE | FSAL_O_DENY_WRITE_MAND))
		share |= COLDRISE_SHARE_DENY_WRITE;
	return share;
}

/* Changes are stable when the answer leaves. */
static fsal_status_t set_size(struct coldrise_fsal_handle *handle,
			      uint64_t size)
{
	if (coldrise_node_set_size(handle->node, size) == -1) {
		bool is_fixed = errno == EOPNOTSUPP;
		fsal_status_t status =
			coldrise_failed(coldrise_node_path(handle->node));

		/* Linux does not understand an operation that is unsupported
		 * for only one file; truncate(2) documents EPERM.
		 */
		return is_fixed ? fsalstat(ERR_FSAL_PERM, EPERM) : status;
	}
	return coldrise_flush(handle);
}

/* Opens an existing file. The caller holds the lock. */
static fsal_status_t open_locked(struct coldrise_fsal_handle *handle,
				 struct state_t *state,
				 fsal_openflags_t flags)
{
	if (state == NULL)
		return fsalstat(ERR_FSAL_NO_ERROR, 0);
	if (coldrise_node_open(handle->node, share_of(flags)) == -1)
		return coldrise_failed(coldrise_node_path(handle->node));
	state_fd(state)->openflags = FSAL_O_NFS_FLAGS(flags);
	return fsalstat(ERR_FSAL_NO_ERROR, 0);
}

static fsal_status_t close2(struct fsal_obj_handle *obj, struct state_t *state)
{
	struct coldrise_fsal_handle *handle = coldrise_handle(obj);
	struct fsal_fd *fd = state_fd(state);

	PTHREAD_RWLOCK_wrlock(&obj->obj_lock);
	if (fd->openflags != FSAL_O_CLOSED) {
		coldrise_node_close(handle->node, share_of(fd->openflags));
		fd->openflags = FSAL_O_CLOSED;
	}
	PTHREAD_RWLOCK_unlock(&obj->obj_lock);
	return fsalstat(ERR_FSAL_NO_ERROR, 0);
}

/* Whether an earlier transmission of this request made the file. */
static bool was_made_by(struct coldrise_fsal_handle *handle,
			fsal_verifier_t verifier)
{
	struct coldrise_attributes found;

	return coldrise_node_attributes(handle->node, &found) == 0
		&& found.has_verifier
		&& memcmp(found.verifier, verifier,
			  sizeof(found.verifier)) == 0;
}

static fsal_status_t open_here(struct fsal_obj_handle *obj,
			       struct state_t *state, fsal_openflags_t flags,
			       struct fsal_attrlist *attrs_out)
{
	struct coldrise_fsal_handle *handle = coldrise_handle(obj);
	fsal_status_t status;

	if (obj->type != REGULAR_FILE)
		return fsalstat(obj->type == DIRECTORY ? ERR_FSAL_ISDIR
						       : ERR_FSAL_SYMLINK, 0);

	PTHREAD_RWLOCK_wrlock(&obj->obj_lock);
	status = open_locked(handle, state, flags);
	PTHREAD_RWLOCK_unlock(&obj->obj_lock);
	if (FSAL_IS_ERROR(status))
		return status;

	if (flags & FSAL_O_TRUNC)
		status = set_size(handle, 0);
	if (!FSAL_IS_ERROR(status) && attrs_out != NULL)
		status = coldrise_get_attrs(obj, attrs_out);
	if (FSAL_IS_ERROR(status) && state != NULL)
		close2(obj, state);
	return status;
}

static int creation_of(enum fsal_create_mode createmode)
{
	switch (createmode) {
	case FSAL_GUARDED:
		return COLDRISE_CREATE_GUARDED;
	case FSAL_EXCLUSIVE:
	case FSAL_EXCLUSIVE_41:
		return COLDRISE_CREATE_EXCLUSIVE;
	default:
		return COLDRISE_CREATE_UNCHECKED;
	}
}

static fsal_status_t open2(struct fsal_obj_handle *obj, struct state_t *state,
			   fsal_openflags_t flags,
			   enum fsal_create_mode createmode, const char *name,
			   struct fsal_attrlist *attrs_set,
			   fsal_verifier_t verifier,
			   struct fsal_obj_handle **new_obj,
			   struct fsal_attrlist *attrs_out,
			   bool *caller_perm_check)
{
	int how = creation_of(createmode);
	struct fsal_obj_handle *found;
	fsal_status_t status;

	if (attrs_set != NULL && (attrs_set->valid_mask & ATTR_SIZE)
	    && attrs_set->filesize == 0)
		flags |= FSAL_O_TRUNC;

	if (name == NULL) {
		if (how == COLDRISE_CREATE_GUARDED
		    || (how == COLDRISE_CREATE_EXCLUSIVE
			&& !was_made_by(coldrise_handle(obj), verifier)))
			return fsalstat(ERR_FSAL_EXIST, EEXIST);
		return open_here(obj, state, flags, attrs_out);
	}

	if (createmode == FSAL_NO_CREATE)
		status = obj->obj_ops->lookup(obj, name, &found, NULL);
	else
		status = coldrise_make(obj, name, how, verifier, attrs_set,
				       &found);
	if (FSAL_IS_ERROR(status))
		return status;

	*caller_perm_check = createmode == FSAL_NO_CREATE;
	if (createmode != FSAL_NO_CREATE && attrs_set != NULL
	    && (attrs_set->valid_mask & ATTR_SIZE) && attrs_set->filesize > 0)
		status = set_size(coldrise_handle(found), attrs_set->filesize);
	if (!FSAL_IS_ERROR(status))
		status = open_here(found, state, flags, attrs_out);
	if (FSAL_IS_ERROR(status)) {
		found->obj_ops->release(found);
		return status;
	}
	*new_obj = found;
	return status;
}

static fsal_status_t reopen2(struct fsal_obj_handle *obj,
			     struct state_t *state, fsal_openflags_t flags)
{
	struct coldrise_fsal_handle *handle = coldrise_handle(obj);
	struct fsal_fd *fd = state_fd(state);
	fsal_status_t status = fsalstat(ERR_FSAL_NO_ERROR, 0);

	PTHREAD_RWLOCK_wrlock(&obj->obj_lock);
	if (coldrise_node_reopen(handle->node, share_of(fd->openflags),
				 share_of(flags)) == -1)
		status = coldrise_failed(coldrise_node_path(handle->node));
	else
		fd->openflags = FSAL_O_NFS_FLAGS(flags);
	PTHREAD_RWLOCK_unlock(&obj->obj_lock);
	return status;
}

static fsal_openflags_t status2(struct fsal_obj_handle *obj,
				struct state_t *state)
{
	(void) obj;
	return state_fd(state)->openflags;
}

/* The global open of a file; unsupported. */
static fsal_status_t close_global(struct fsal_obj_handle *obj)
{
	(void) obj;
	return fsalstat(ERR_FSAL_NOT_OPENED, 0);
}

/* Converts nfs-ganesha's times and modes for the library. */
static struct coldrise_changes changes_of(const struct fsal_attrlist *attrs)
{
	struct coldrise_changes changes = { 0 };
	struct timespec now;

	if (FSAL_TEST_MASK(attrs->valid_mask, ATTR_MODE)) {
		changes.what |= COLDRISE_CHANGE_MODE;
		changes.mode = fsal2unix_mode(attrs->mode);
	}
	if (FSAL_TEST_MASK(attrs->valid_mask, ATTR_MTIME_SERVER)) {
		clock_gettime(CLOCK_REALTIME, &now);
		changes.what |= COLDRISE_CHANGE_MODIFIED;
		changes.modified_s = now.tv_sec;
		changes.modified_ns = now.tv_nsec;
	} else if (FSAL_TEST_MASK(attrs->valid_mask, ATTR_MTIME)) {
		changes.what |= COLDRISE_CHANGE_MODIFIED;
		changes.modified_s = attrs->mtime.tv_sec;
		changes.modified_ns = attrs->mtime.tv_nsec;
	}
	return changes;
}

/* Accepts owners without effect; on a session's disks everything except a
 * size: copy programs fail otherwise.
 */
static fsal_status_t setattr2(struct fsal_obj_handle *obj, bool bypass,
			      struct state_t *state,
			      struct fsal_attrlist *attrs)
{
	struct coldrise_fsal_handle *handle = coldrise_handle(obj);
	struct coldrise_changes changes = changes_of(attrs);
	struct coldrise_attributes found;
	fsal_status_t status;

	if (coldrise_node_attributes(handle->node, &found) == -1)
		return coldrise_failed(coldrise_node_path(handle->node));
	if ((found.mode & S_IWUSR) == 0)
		return fsalstat(ERR_FSAL_ROFS, EROFS);

	if (FSAL_TEST_MASK(attrs->valid_mask, ATTR_SIZE)) {
		status = coldrise_check_share(handle, bypass, state, FSAL_O_WRITE);
		if (!FSAL_IS_ERROR(status))
			status = set_size(handle, attrs->filesize);
		if (FSAL_IS_ERROR(status))
			return status;
	}
	if (changes.what != 0
	    && coldrise_node_change(handle->node, &changes) == -1)
		return coldrise_failed(coldrise_node_path(handle->node));
	return fsalstat(ERR_FSAL_NO_ERROR, 0);
}

void coldrise_file_ops_init(struct fsal_obj_ops *ops)
{
	ops->open2 = open2;
	ops->status2 = status2;
	ops->reopen2 = reopen2;
	ops->close = close_global;
	ops->close2 = close2;
	ops->setattr2 = setattr2;
}
