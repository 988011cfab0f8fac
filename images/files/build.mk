# The machine that reads file systems, for `coldrise files`. Included by the top Makefile.
#
# Its init is a static program, so it has a target folder of its own.

FILES_KERNEL := $(BUILD_DIR)/coldrise-files-kernel
FILES_INITRD := $(BUILD_DIR)/coldrise-files-initrd
FILES_TARGET := build/files/target
FILES_INIT := $(FILES_TARGET)/x86_64-unknown-linux-gnu/release/coldrise-files-init
FILES_SOURCES := Cargo.lock $(wildcard images/files/* images/files/init/src/* images/files/protocol/src/*)

.PHONY: files-image
files-image: $(FILES_INITRD) ## Build the machine that reads file systems

$(FILES_INIT): $(FILES_SOURCES)
	RUSTFLAGS="-C target-feature=+crt-static -C panic=abort" $(CARGO) build --release --locked --quiet \
	    -p coldrise-files-init --target x86_64-unknown-linux-gnu --target-dir $(FILES_TARGET)
	@touch $@

$(FILES_INITRD): $(FILES_INIT)
	images/files/build.sh $(FILES_INIT) $(FILES_KERNEL) $@
