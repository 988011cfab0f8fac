# The nbdkit plugin. Included by the top Makefile, which may set CC, CFLAGS, LDFLAGS
# and CARGO; run from the top folder.
#
# It is linked into one file next to the coldrise program, where that finds it:
# the Rust side as a static library, RocksDB as the system's shared one.

CARGO ?= cargo
BUILD_DIR ?= target/release

NBDKIT_PLUGIN := $(BUILD_DIR)/nbdkit-coldrise-plugin.so
NBDKIT_PRELOAD := $(BUILD_DIR)/nbdkit-coldrise-preload.so

# pkg-config knows nbdkit's flags; Debian puts the header where no flag is needed.
NBDKIT_CFLAGS = -std=c11 -D_GNU_SOURCE -O2 -g -fPIC -fvisibility=hidden \
    -Wall -Wextra -Wshadow -Wstrict-prototypes -Wvla -Werror \
    -DCOLDRISE_VERSION='"$(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)"' \
    -Iserver/capi/include $(shell pkg-config --cflags nbdkit 2>/dev/null)

# Only plugin_init leaves the file. It stays mapped after nbdkit closes it, since
# threads of RocksDB may still be ending. The C++ runtime comes with librocksdb.
NBDKIT_LDFLAGS = -shared -Wl,--version-script=plugins/nbdkit/plugin.syms \
    -Wl,-z,nodelete -Wl,-z,relro,-z,now -Wl,--gc-sections -Wl,--no-undefined-version

.PHONY: nbdkit-plugin
nbdkit-plugin: $(NBDKIT_PLUGIN) $(NBDKIT_PRELOAD) ## Build the nbdkit plugin

$(NBDKIT_PRELOAD): plugins/nbdkit/preload.c
	$(CC) $(NBDKIT_CFLAGS) -fasynchronous-unwind-tables $(CFLAGS) -o $@.new $< \
	    -shared -Wl,-z,relro,-z,now $(LDFLAGS) -ldl
	mv $@.new $@

# What cargo builds at once shares its choice of features: the same packages as in
# the top Makefile's build, so that nothing is compiled twice.
RELEASE_PACKAGES ?= --package coldrise-cli --package coldrise-service --package coldrise-capi

# cargo decides quickly whether the library is up to date.
.PHONY: capi-library
capi-library:
	$(CARGO) build --release --locked --quiet $(RELEASE_PACKAGES)

$(BUILD_DIR)/libcoldrise_capi.a: capi-library ;

$(NBDKIT_PLUGIN): plugins/nbdkit/coldrise.c plugins/nbdkit/plugin.syms \
    server/capi/include/coldrise.h $(BUILD_DIR)/libcoldrise_capi.a
	$(CC) $(NBDKIT_CFLAGS) $(CFLAGS) -o $@.new $< \
	    $(BUILD_DIR)/libcoldrise_capi.a $(NBDKIT_LDFLAGS) $(LDFLAGS) \
	    -lrocksdb -lstdc++ -lgcc_s -lpthread -ldl -lm
	mv $@.new $@
