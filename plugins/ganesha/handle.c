/* FSAL_COLDRISE: folders, links, attributes, handles on the wire. */

#include "fsal_coldrise.h"

#include "nfs_exports.h"

/* Entries read ahead for the cache. */
#define READ_AHEAD_ENTRIES 1024

static object_file_type_t object_type(const coldrise_node *node)
{
	switch (coldrise_node_type(node)) {
	case COLDRISE_NODE_FOLDER:
		return DIRECTORY;
	case COLDRISE_NODE_FILE:
		return REGULAR_FILE;
	case COLDRISE_NODE_LINK:
		return SYMBOLIC_LINK;
	}
	return NO_FILE_TYPE;
}

/* Takes over `node`. */
static struct coldrise_fsal_handle *new_handle(struct fsal_export *export,
					       coldrise_node *node)
{
	struct coldrise_fsal_handle *handle = gsh_calloc(1, sizeof(*handle));
	int len = coldrise_node_handle(node, handle->wire);

	if (len == -1) {
		coldrise_failed(coldrise_node_path(node));
		coldrise_node_release(node);
		gsh_free(handle);
		return NULL;
	}

	handle->node = node;
	handle->wire_len = len;
	fsal_obj_handle_init(&handle->obj, export, object_type(node));
	handle->obj.obj_ops = &COLDRISE.handle_ops;
	handle->obj.fileid = coldrise_node_id(node);
	handle->obj.fsid.major = op_ctx->ctx_export->export_id;
	return handle;
}

static void free_handle(struct coldrise_fsal_handle *handle)
{
	/* The release closes the files, but cannot report a failed sync. */
	coldrise_flush(handle);
	fsal_obj_handle_fini(&handle->obj);
	coldrise_node_release(handle->node);
	gsh_free(handle);
}

static void release(struct fsal_obj_handle *obj)
{
	free_handle(coldrise_handle(obj));
}

/* Two look-ups made two handles of the same node; `obj` stays. */
static fsal_status_t merge(struct fsal_obj_handle *obj,
			   struct fsal_obj_handle *new_obj)
{
	struct coldrise_fsal_handle *old = coldrise_handle(obj);
	struct coldrise_fsal_handle *new = coldrise_handle(new_obj);

	if (obj != new_obj && obj->type == REGULAR_FILE
	    && coldrise_node_take_over(old->node, new->node) == -1)
		return coldrise_failed(coldrise_node_path(old->node));
	return fsalstat(ERR_FSAL_NO_ERROR, 0);
}

static void fill(const struct fsal_obj_handle *obj,
		 const struct coldrise_attributes *found,
		 struct fsal_attrlist *attrs)
{
	attrs->type = obj->type;
	attrs->filesize = found->size_bytes;
	attrs->fsid = obj->fsid;
	attrs->fileid = obj->fileid;
	attrs->mode = found->mode;
	attrs->numlinks = obj->type == DIRECTORY ? 2 : 1;
	attrs->owner = COLDRISE.user;
	attrs->group = COLDRISE.group;
	attrs->rawdev.major = 0;
	attrs->rawdev.minor = 0;
	attrs->mtime.tv_sec = found->modified_s;
	attrs->mtime.tv_nsec = found->modified_ns;
	attrs->atime = attrs->mtime;
	attrs->ctime.tv_sec = found->changed_s;
	attrs->ctime.tv_nsec = found->changed_ns;
	if (found->has_verifier) {
		/* nfs-ganesha looks for it in the times, 4 bytes in each. */
		uint32_t half;

		memcpy(&half, found->verifier, sizeof(half));
		attrs->atime.tv_sec = half;
		memcpy(&half, found->verifier + sizeof(half), sizeof(half));
		attrs->mtime.tv_sec = half;
	}
	attrs->spaceused = found->stored_bytes;
	attrs->change = found->change;
	attrs->expire_time_attr = found->valid_s;
	attrs->supported = ATTRS_POSIX;
	attrs->valid_mask = ATTRS_POSIX;
}

fsal_status_t coldrise_get_attrs(struct fsal_obj_handle *obj,
				 struct fsal_attrlist *attrs)
{
	struct coldrise_fsal_handle *handle = coldrise_handle(obj);
	struct coldrise_attributes found;

	if (coldrise_node_attributes(handle->node, &found) == -1) {
		fsal_status_t status =
			coldrise_failed(coldrise_node_path(handle->node));

		/* The entry is then shown without them. */
		if (attrs->request_mask & ATTR_RDATTR_ERR) {
			attrs->valid_mask = ATTR_RDATTR_ERR;
			if (status.major != ERR_FSAL_STALE)
				return fsalstat(ERR_FSAL_NO_ERROR, 0);
		}
		return status;
	}

	fill(obj, &found, attrs);
	return fsalstat(ERR_FSAL_NO_ERROR, 0);
}

fsal_status_t coldrise_give(struct fsal_export *export, coldrise_node *node,
			    struct fsal_obj_handle **obj,
			    struct fsal_attrlist *attrs_out)
{
	struct coldrise_fsal_handle *handle = new_handle(export, node);

	if (handle == NULL)
		return fsalstat(ERR_FSAL_SERVERFAULT, 0);

	if (attrs_out != NULL) {
		fsal_status_t status = coldrise_get_attrs(&handle->obj,
							  attrs_out);

		if (FSAL_IS_ERROR(status)) {
			free_handle(handle);
			return status;
		}
	}

	*obj = &handle->obj;
	return fsalstat(ERR_FSAL_NO_ERROR, 0);
}

static fsal_status_t getattrs(struct fsal_obj_handle *obj,
			      struct fsal_attrlist *attrs)
{
	return coldrise_get_attrs(obj, attrs);
}

static fsal_status_t lookup(struct fsal_obj_handle *dir, const char *name,
			    struct fsal_obj_handle **obj,
			    struct fsal_attrlist *attrs_out)
{
	struct coldrise_fsal_handle *folder = coldrise_handle(dir);
	coldrise_node *node;
	int rc;

	*obj = NULL;
	if (strcmp(name, "..") == 0)
		rc = coldrise_node_parent(folder->node, &node);
	else
		rc = coldrise_node_find(folder->node, name, &node);
	if (rc == -1)
		return coldrise_failed(name);

	return coldrise_give(op_ctx->fsal_export, node, obj, attrs_out);
}

struct reading {
	fsal_readdir_cb cb;
	void *dir_state;
	attrmask_t attrmask;
	uint32_t count;
	fsal_status_t status;
};

static int read_entry(void *context, const char *name, coldrise_node *node,
		      uint64_t cookie)
{
	struct reading *reading = context;
	struct coldrise_fsal_handle *handle;
	struct fsal_attrlist attrs;
	enum fsal_dir_result result;

	handle = new_handle(op_ctx->fsal_export, node);
	if (handle == NULL) {
		reading->status = fsalstat(ERR_FSAL_SERVERFAULT, 0);
		return 1;
	}

	fsal_prepare_attrs(&attrs, reading->attrmask);
	reading->status = coldrise_get_attrs(&handle->obj, &attrs);
	if (FSAL_IS_ERROR(reading->status)) {
		bool is_gone = reading->status.major == ERR_FSAL_STALE;

		fsal_release_attrs(&attrs);
		free_handle(handle);
		if (!is_gone)
			return 1;
		/* It was removed since the listing. */
		reading->status = fsalstat(ERR_FSAL_NO_ERROR, 0);
		return 0;
	}

	/* This takes over the handle. */
	result = reading->cb(name, &handle->obj, &attrs, reading->dir_state,
			     cookie);
	fsal_release_attrs(&attrs);
	reading->count++;
	return result >= DIR_TERMINATE
		|| (result == DIR_READAHEAD
		    && reading->count >= READ_AHEAD_ENTRIES);
}

static fsal_status_t read_dir(struct fsal_obj_handle *dir,
			     fsal_cookie_t *whence, void *dir_state,
			     fsal_readdir_cb cb, attrmask_t attrmask,
			     bool *eof)
{
	struct coldrise_fsal_handle *folder = coldrise_handle(dir);
	struct reading reading = {
		.cb = cb,
		.dir_state = dir_state,
		.attrmask = attrmask,
		.status = { ERR_FSAL_NO_ERROR, 0 },
	};
	int rc;

	rc = coldrise_node_list(folder->node, whence == NULL ? 0 : *whence,
				read_entry, &reading);
	if (rc == -1)
		return coldrise_failed(coldrise_node_path(folder->node));
	*eof = rc == 1;
	return reading.status;
}

static fsal_status_t readlink_target(struct fsal_obj_handle *obj,
				     struct gsh_buffdesc *content,
				     bool refresh)
{
	struct coldrise_fsal_handle *handle = coldrise_handle(obj);
	char target[COLDRISE_NAME_MAX];

	(void) refresh;
	if (coldrise_node_target(handle->node, target) == -1)
		return coldrise_failed(coldrise_node_path(handle->node));
	content->addr = gsh_strdup(target);
	content->len = strlen(target) + 1;
	return fsalstat(ERR_FSAL_NO_ERROR, 0);
}

static fsal_status_t handle_to_wire(const struct fsal_obj_handle *obj,
				    fsal_digesttype_t type,
				    struct gsh_buffdesc *desc)
{
	const struct coldrise_fsal_handle *handle =
		container_of(obj, const struct coldrise_fsal_handle, obj);

	(void) type;
	if (desc->len < handle->wire_len)
		return fsalstat(ERR_FSAL_TOOSMALL, 0);
	memcpy(desc->addr, handle->wire, handle->wire_len);
	desc->len = handle->wire_len;
	return fsalstat(ERR_FSAL_NO_ERROR, 0);
}

static void handle_to_key(struct fsal_obj_handle *obj,
			  struct gsh_buffdesc *desc)
{
	struct coldrise_fsal_handle *handle = coldrise_handle(obj);

	desc->addr = handle->wire;
	desc->len = handle->wire_len;
}

static uint32_t mode_of(const struct fsal_attrlist *attrs, uint32_t otherwise)
{
	if (attrs != NULL && FSAL_TEST_MASK(attrs->valid_mask, ATTR_MODE))
		return fsal2unix_mode(attrs->mode);
	return otherwise;
}

fsal_status_t coldrise_make(struct fsal_obj_handle *dir, const char *name,
			    int how, const void *verifier,
			    const struct fsal_attrlist *attrs_in,
			    struct fsal_obj_handle **obj)
{
	coldrise_node *node;

	*obj = NULL;
	if (coldrise_node_create(coldrise_handle(dir)->node, name, how,
				 verifier, mode_of(attrs_in, 0600),
				 &node) == -1)
		return coldrise_failed(name);
	return coldrise_give(op_ctx->fsal_export, node, obj, NULL);
}

static fsal_status_t make_dir(struct fsal_obj_handle *dir, const char *name,
			      struct fsal_attrlist *attrs_in,
			      struct fsal_obj_handle **obj,
			      struct fsal_attrlist *attrs_out)
{
	coldrise_node *node;

	*obj = NULL;
	if (coldrise_node_make_folder(coldrise_handle(dir)->node, name,
				      mode_of(attrs_in, 0700), &node) == -1)
		return coldrise_failed(name);
	return coldrise_give(op_ctx->fsal_export, node, obj, attrs_out);
}

static fsal_status_t remove_entry(struct fsal_obj_handle *dir,
				  struct fsal_obj_handle *obj,
				  const char *name)
{
	(void) obj;
	if (coldrise_node_remove(coldrise_handle(dir)->node, name) == -1)
		return coldrise_failed(name);
	return fsalstat(ERR_FSAL_NO_ERROR, 0);
}

static fsal_status_t rename_entry(struct fsal_obj_handle *obj,
				  struct fsal_obj_handle *old_dir,
				  const char *old_name,
				  struct fsal_obj_handle *new_dir,
				  const char *new_name)
{
	(void) obj;
	if (coldrise_node_rename(coldrise_handle(old_dir)->node, old_name,
				 coldrise_handle(new_dir)->node,
				 new_name) == -1)
		return coldrise_failed(old_name);
	return fsalstat(ERR_FSAL_NO_ERROR, 0);
}

/* There are files and folders, no links and no devices. EPERM is the usual
 * error of file systems without them; Linux does not understand NFS's own
 * status for it.
 */
static fsal_status_t refuse(struct fsal_obj_handle *dir)
{
	struct coldrise_fsal_handle *folder = coldrise_handle(dir);
	struct coldrise_attributes found;

	if (coldrise_node_attributes(folder->node, &found) == -1)
		return coldrise_failed(coldrise_node_path(folder->node));
	if ((found.mode & S_IWUSR) == 0)
		return fsalstat(ERR_FSAL_ROFS, EROFS);
	return fsalstat(ERR_FSAL_PERM, EPERM);
}

static fsal_status_t no_mknode(struct fsal_obj_handle *dir, const char *name,
			       object_file_type_t type,
			       struct fsal_attrlist *attrs_in,
			       struct fsal_obj_handle **obj,
			       struct fsal_attrlist *attrs_out)
{
	(void) name;
	(void) type;
	(void) attrs_in;
	(void) attrs_out;
	*obj = NULL;
	return refuse(dir);
}

static fsal_status_t no_symlink(struct fsal_obj_handle *dir, const char *name,
				const char *target,
				struct fsal_attrlist *attrs_in,
				struct fsal_obj_handle **obj,
				struct fsal_attrlist *attrs_out)
{
	(void) target;
	return no_mknode(dir, name, SYMBOLIC_LINK, attrs_in, obj, attrs_out);
}

static fsal_status_t no_link(struct fsal_obj_handle *obj,
			     struct fsal_obj_handle *dir, const char *name)
{
	(void) obj;
	(void) name;
	return refuse(dir);
}

void coldrise_handle_ops_init(struct fsal_obj_ops *ops)
{
	ops->release = release;
	ops->merge = merge;
	ops->lookup = lookup;
	ops->readdir = read_dir;
	ops->readlink = readlink_target;
	ops->getattrs = getattrs;
	ops->handle_to_wire = handle_to_wire;
	ops->handle_to_key = handle_to_key;
	ops->mkdir = make_dir;
	ops->mknode = no_mknode;
	ops->symlink = no_symlink;
	ops->link = no_link;
	ops->rename = rename_entry;
	ops->unlink = remove_entry;
}
