/* FSAL_COLDRISE: an EXPORT is a repository.
 *
 *   EXPORT {
 *     ...
 *     FSAL {
 *       Name = COLDRISE;
 *       Repository = "/srv/backups";
 *       Passphrase_File = "/etc/coldrise/passphrase";
 *     }
 *   }
 */

#include "fsal_coldrise.h"

#include "FSAL/fsal_config.h"
#include "config_parsing.h"
#include "nfs_exports.h"

static struct config_item export_params[] = {
	CONF_ITEM_NOOP("Name"),
	CONF_MAND_STR("Repository", 1, MAXPATHLEN, NULL,
		      coldrise_fsal_export, repository),
	CONF_ITEM_STR("Passphrase_File", 1, MAXPATHLEN, NULL,
		      coldrise_fsal_export, passphrase_file),
	CONF_ITEM_STR("Passphrase_Command", 1, MAXPATHLEN, NULL,
		      coldrise_fsal_export, passphrase_command),
	/* Memory for decoded chunks, in bytes; by default an eighth of the
	 * machine's memory
	 */
	CONF_ITEM_UI64("Chunk_Cache", 0, UINT64_MAX, COLDRISE_CACHE_DEFAULT,
		       coldrise_fsal_export, chunk_cache),
	/* Idle time in milliseconds after which a file is closed that no
	 * client has open (NFSv3 clients never have)
	 */
	CONF_ITEM_UI32("Idle_Ms", 1, UINT32_MAX, 60000,
		       coldrise_fsal_export, idle_ms),
	/* Sessions are read-only, too */
	CONF_ITEM_BOOL("Read_Only", false,
		       coldrise_fsal_export, read_only),
	/* If this repository is missing, nfs-ganesha ends instead of serving
	 * its other exports
	 */
	CONF_ITEM_BOOL("Required", false,
		       coldrise_fsal_export, required),
	CONFIG_EOL
};

static struct config_block export_block = {
	.dbus_interface_name = "org.ganesha.nfsd.config.fsal.coldrise-export%d",
	.blk_desc.name = "FSAL",
	.blk_desc.type = CONFIG_BLOCK,
	.blk_desc.u.blk.init = noop_conf_init,
	.blk_desc.u.blk.params = export_params,
	.blk_desc.u.blk.commit = noop_conf_commit
};

static void free_export(struct coldrise_fsal_export *myself)
{
	coldrise_folders_close(myself->folders);
	gsh_free(myself->path);
	gsh_free(myself->repository);
	gsh_free(myself->passphrase_file);
	gsh_free(myself->passphrase_command);
	gsh_free(myself);
}

/* FSAL_MDCACHE asks for attributes under a lock, and stores them before it
 * releases the lock: a thread with older attributes has stored them when our
 * call returns.
 */
static void forget_attributes(void *context, const void *wire, size_t length)
{
	struct coldrise_fsal_export *myself = context;
	const struct fsal_up_vector *up = myself->export.up_ops;
	uint8_t key[COLDRISE_HANDLE_MAX];
	struct gsh_buffdesc desc = { .addr = key, .len = length };
	struct req_op_context context_here;
	struct fsal_obj_handle *obj;
	struct fsal_attrlist attrs;

	if (length > sizeof(key))
		return;
	memcpy(key, wire, length);

	get_gsh_export_ref(up->up_gsh_export);
	init_op_context_simple(&context_here, up->up_gsh_export,
			       up->up_fsal_export);
	if (!FSAL_IS_ERROR(up->up_fsal_export->exp_ops.create_handle(
				up->up_fsal_export, &desc, &obj, NULL))) {
		fsal_prepare_attrs(&attrs, ATTR_SIZE);
		(void) obj->obj_ops->getattrs(obj, &attrs);
		fsal_release_attrs(&attrs);
		(void) up->invalidate(up, &desc, FSAL_UP_INVALIDATE_ATTRS);
		obj->obj_ops->put_ref(obj);
	}
	release_op_context();
}

/* The cache is about to be freed: end the callbacks. */
static void prepare_unexport(struct fsal_export *export)
{
	coldrise_folders_watch(coldrise_export_of(export)->folders, NULL, NULL);
}

fsal_status_t coldrise_create_export(struct fsal_module *module,
				     void *parse_node,
				     struct config_error_type *err_type,
				     const struct fsal_up_vector *up_ops)
{
	struct coldrise_fsal_export *myself = gsh_calloc(1, sizeof(*myself));
	struct coldrise_options options = { .program = "ganesha" };
	fsal_status_t status;
	int rc;

	fsal_export_init(&myself->export);
	coldrise_export_ops_init(&myself->export.exp_ops);

	if (load_config_from_node(parse_node, &export_block, myself, true,
				  err_type) != 0) {
		status = fsalstat(ERR_FSAL_INVAL, EINVAL);
		goto fail;
	}

	options.passphrase_file = myself->passphrase_file;
	options.passphrase_command = myself->passphrase_command;
	options.cache_bytes = myself->chunk_cache;
	if (coldrise_folders_open(myself->repository, &options, NULL,
				  myself->idle_ms,
				  myself->read_only
					? COLDRISE_FOLDERS_READ_ONLY : 0,
				  &myself->folders) == -1) {
		status = fsalstat(ERR_FSAL_BAD_INIT, errno);
		LogCrit(COMPONENT_FSAL, "%s: %s", myself->repository,
			coldrise_last_error());
		if (myself->required)
			LogFatal(COMPONENT_FSAL, "%s is not served",
				 myself->repository);
		goto fail;
	}

	rc = fsal_attach_export(module, &myself->export.exports);
	if (rc != 0) {
		LogCrit(COMPONENT_FSAL, "Could not attach the export");
		status = posix2fsal_status(rc);
		goto fail;
	}

	myself->export.fsal = module;
	myself->export.up_ops = up_ops;
	myself->path = gsh_strdup(CTX_FULLPATH(op_ctx));
	op_ctx->fsal_export = &myself->export;
	coldrise_folders_watch(myself->folders, forget_attributes, myself);
	return fsalstat(ERR_FSAL_NO_ERROR, 0);

fail:
	free_export_ops(&myself->export);
	free_export(myself);
	return status;
}

static void release(struct fsal_export *export)
{
	struct coldrise_fsal_export *myself = coldrise_export_of(export);

	fsal_detach_export(export->fsal, &export->exports);
	free_export_ops(export);
	free_export(myself);
}

/* nfs-ganesha asks only for the export's own path, and looks up names from
 * there.
 */
static fsal_status_t lookup_path(struct fsal_export *export, const char *path,
				 struct fsal_obj_handle **obj,
				 struct fsal_attrlist *attrs_out)
{
	struct coldrise_fsal_export *myself = coldrise_export_of(export);
	coldrise_node *root;

	*obj = NULL;
	if (strcmp(path, myself->path) != 0)
		return fsalstat(ERR_FSAL_NOENT, ENOENT);
	if (coldrise_node_root(myself->folders, &root) == -1)
		return coldrise_failed("the root");
	return coldrise_give(export, root, obj, attrs_out);
}

/* The bytes on the wire are the same on all machines: no conversion is
 * needed.
 */
static fsal_status_t wire_to_host(struct fsal_export *export,
				  fsal_digesttype_t type,
				  struct gsh_buffdesc *desc, int flags)
{
	(void) export;
	(void) type;
	(void) flags;
	if (desc->len < 2 || desc->len > COLDRISE_HANDLE_MAX)
		return fsalstat(ERR_FSAL_BADHANDLE, 0);
	return fsalstat(ERR_FSAL_NO_ERROR, 0);
}

static fsal_status_t create_handle(struct fsal_export *export,
				   struct gsh_buffdesc *desc,
				   struct fsal_obj_handle **obj,
				   struct fsal_attrlist *attrs_out)
{
	struct coldrise_fsal_export *myself = coldrise_export_of(export);
	coldrise_node *node;

	*obj = NULL;
	if (coldrise_node_of_handle(myself->folders, desc->addr, desc->len,
				    &node) == -1) {
		if (errno == EINVAL)
			return fsalstat(ERR_FSAL_BADHANDLE, errno);
		return coldrise_failed("a handle");
	}
	return coldrise_give(export, node, obj, attrs_out);
}

static fsal_status_t get_dynamic_info(struct fsal_export *export,
				      struct fsal_obj_handle *obj,
				      fsal_dynamicfsinfo_t *info)
{
	struct coldrise_fsal_export *myself = coldrise_export_of(export);
	struct coldrise_space space;

	(void) obj;
	if (coldrise_folders_space(myself->folders, &space) == -1)
		return coldrise_failed("free space");

	memset(info, 0, sizeof(*info));
	info->total_bytes = space.total_bytes;
	info->free_bytes = space.free_bytes;
	info->avail_bytes = space.available_bytes;
	info->time_delta.tv_nsec = 1000000;
	return fsalstat(ERR_FSAL_NO_ERROR, 0);
}

static struct state_t *alloc_state(struct fsal_export *export,
				   enum state_type type,
				   struct state_t *related)
{
	size_t size = sizeof(struct state_t) + sizeof(struct fsal_fd);

	return init_state(gsh_calloc(1, size), export, type, related);
}

void coldrise_export_ops_init(struct export_ops *ops)
{
	ops->release = release;
	ops->prepare_unexport = prepare_unexport;
	ops->lookup_path = lookup_path;
	ops->wire_to_host = wire_to_host;
	ops->create_handle = create_handle;
	ops->get_fs_dynamic_info = get_dynamic_info;
	ops->alloc_state = alloc_state;
}
