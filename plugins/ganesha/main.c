/* FSAL_COLDRISE: the module. */

#include "fsal_coldrise.h"

#include "FSAL/fsal_init.h"

static const char module_name[] = "COLDRISE";

struct coldrise_fsal_module COLDRISE = {
	.fsal = {
		.fs_info = {
			.maxfilesize = INT64_MAX,
			.maxlink = 1,
			.maxnamelen = MAXNAMLEN,
			.maxpathlen = MAXPATHLEN,
			.no_trunc = true,
			.chown_restricted = true,
			.case_preserving = true,
			.symlink_support = true,
			.unique_handles = true,
			.cansettime = true,
			.homogenous = true,
			.supported_attrs = ATTRS_POSIX,
			.maxread = FSAL_MAXIOSIZE,
			.maxwrite = FSAL_MAXIOSIZE,
			.readdir_plus = true,
			.compliant_eof_behavior = true,
			.expire_time_parent = -1,
			/* Byte-range locks are nfs-ganesha's own: no other
			 * program locks these files.
			 */
			.lock_support = false,
		}
	}
};

fsal_status_t coldrise_failed(const char *what)
{
	int err = errno;

	switch (err) {
	case ENOENT:
	case ESTALE:
	case EEXIST:
	case ENOTEMPTY:
	case EISDIR:
	case ENOTDIR:
	case ETXTBSY:
		LogDebug(COMPONENT_FSAL, "%s: %s", what, coldrise_last_error());
		break;
	case EIO:
	case ENOSPC:
		LogCrit(COMPONENT_FSAL, "%s: %s", what, coldrise_last_error());
		break;
	default:
		LogWarn(COMPONENT_FSAL, "%s: %s", what, coldrise_last_error());
		break;
	}

	switch (err) {
	case ESTALE:
		return fsalstat(ERR_FSAL_STALE, err);
	case EBUSY:
		/* Another process writes the session. Clients would retry
		 * forever if the answer arrived later.
		 */
		return fsalstat(ERR_FSAL_ACCESS, err);
	case EOPNOTSUPP:
		return fsalstat(ERR_FSAL_NOTSUPP, err);
	default:
		return posix2fsal_status(err);
	}
}

static fsal_status_t coldrise_init_config(struct fsal_module *module,
					  config_file_t config,
					  struct config_error_type *err_type)
{
	(void) config;
	(void) err_type;
	display_fsinfo(module);
	return fsalstat(ERR_FSAL_NO_ERROR, 0);
}

MODULE_INIT void coldrise_init(void)
{
	struct fsal_module *myself = &COLDRISE.fsal;

	if (register_fsal(myself, module_name, FSAL_MAJOR_VERSION,
			  FSAL_MINOR_VERSION, FSAL_ID_NO_PNFS) != 0) {
		LogCrit(COMPONENT_FSAL,
			"FSAL_COLDRISE %s is built for nfs-ganesha "
			GANESHA_VERSION
			" and does not work with this one: install nfs-ganesha "
			GANESHA_VERSION " or build the FSAL for this version",
			coldrise_version());
		return;
	}

	/* It never changes, and is shown with every file. */
	COLDRISE.user = geteuid();
	COLDRISE.group = getegid();

	myself->m_ops.create_export = coldrise_create_export;
	myself->m_ops.init_config = coldrise_init_config;

	fsal_default_obj_ops_init(&COLDRISE.handle_ops);
	coldrise_handle_ops_init(&COLDRISE.handle_ops);
	coldrise_file_ops_init(&COLDRISE.handle_ops);
	coldrise_io_ops_init(&COLDRISE.handle_ops);
}

MODULE_FINI void coldrise_finish(void)
{
	if (unregister_fsal(&COLDRISE.fsal) != 0)
		LogCrit(COMPONENT_FSAL, "FSAL_COLDRISE is still in use");
}
