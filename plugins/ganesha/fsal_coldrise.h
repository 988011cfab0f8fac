/* FSAL_COLDRISE: declarations shared by its files.
 *
 *   main.c     the module: registered when nfs-ganesha loads it
 *   export.c   an EXPORT: the repository and its settings
 *   handle.c   folders, links, attributes, handles on the wire
 *   file.c     opening, sizes, modes and times
 *   io.c       reading, writing, committing
 *
 * They convert between nfs-ganesha's calls and coldrise-folders.h and decide
 * nothing. FSAL_MDCACHE lies above: it caches names and attributes, counts
 * references, and calls from many threads at once.
 */

#ifndef FSAL_COLDRISE_H
#define FSAL_COLDRISE_H

#include "config.h"

#include "fsal.h"
#include "fsal_convert.h"
#include "FSAL/fsal_commonlib.h"

#include "coldrise-folders.h"

struct coldrise_fsal_module {
	struct fsal_module fsal;
	struct fsal_obj_ops handle_ops;
	uid_t user;		/* as whom nfs-ganesha runs */
	gid_t group;
};

extern struct coldrise_fsal_module COLDRISE;

struct coldrise_fsal_export {
	struct fsal_export export;
	char *path;		/* of the export */
	coldrise_folders *folders;

	/* Settings */
	char *repository;
	char *passphrase_file;
	char *passphrase_command;
	uint64_t chunk_cache;
	uint32_t idle_ms;
	bool read_only;
	bool required;
};

struct coldrise_fsal_handle {
	struct fsal_obj_handle obj;
	coldrise_node *node;
	uint8_t wire[COLDRISE_HANDLE_MAX];
	size_t wire_len;
};

static inline struct coldrise_fsal_handle *
coldrise_handle(struct fsal_obj_handle *obj)
{
	return container_of(obj, struct coldrise_fsal_handle, obj);
}

static inline struct coldrise_fsal_export *
coldrise_export_of(struct fsal_export *export)
{
	return container_of(export, struct coldrise_fsal_export, export);
}

/* The status for errno, after a failed call of coldrise-folders.h. Logs every
 * error except those that clients cause all the time.
 */
fsal_status_t coldrise_failed(const char *what);

/* Takes over `node`; returns its object and, if requested, its attributes. */
fsal_status_t coldrise_give(struct fsal_export *export, coldrise_node *node,
			    struct fsal_obj_handle **obj,
			    struct fsal_attrlist *attrs_out);

/* Makes a file in a folder, or opens the existing one; `how` is one of enum
 * coldrise_creation.
 */
fsal_status_t coldrise_make(struct fsal_obj_handle *dir, const char *name,
			    int how, const void *verifier,
			    const struct fsal_attrlist *attrs_in,
			    struct fsal_obj_handle **obj);

/* Makes all writes durable; does not return if that fails and writes may be
 * lost.
 */
fsal_status_t coldrise_flush(struct coldrise_fsal_handle *handle);

/* Checks that no open denies a request without an open. */
fsal_status_t coldrise_check_share(struct coldrise_fsal_handle *handle,
				   bool bypass, struct state_t *state,
				   fsal_openflags_t flags);

/* Fills the requested attributes; on failure as nfs-ganesha expects. */
fsal_status_t coldrise_get_attrs(struct fsal_obj_handle *obj,
				 struct fsal_attrlist *attrs);

void coldrise_handle_ops_init(struct fsal_obj_ops *ops);
void coldrise_file_ops_init(struct fsal_obj_ops *ops);
void coldrise_io_ops_init(struct fsal_obj_ops *ops);
void coldrise_export_ops_init(struct export_ops *ops);

fsal_status_t coldrise_create_export(struct fsal_module *module,
				     void *parse_node,
				     struct config_error_type *err_type,
				     const struct fsal_up_vector *up_ops);

#endif /* FSAL_COLDRISE_H */
