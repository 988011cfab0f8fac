# The NFS server's plugin: an FSAL for nfs-ganesha. Included by the top Makefile; run
# from the top folder.
#
# Debian has nfs-ganesha but none of its headers. They come with its source, which apt
# fetches and checks; configuring it takes seconds and nothing of it is compiled.

GANESHA_VERSION := 4.3
GANESHA_PACKAGE := nfs-ganesha
GANESHA_LIBRARY := /usr/lib/ganesha/libganesha_nfsd.so.$(GANESHA_VERSION)
GANESHA_SUITE ?= bookworm
GANESHA_MIRROR ?= http://deb.debian.org/debian
GANESHA_DIR := build/ganesha
GANESHA_SOURCE := $(GANESHA_DIR)/nfs-ganesha-$(GANESHA_VERSION)/src

# What building the FSAL needs beside what everything needs.
GANESHA_BUILD_PACKAGES := nfs-ganesha libntirpc-dev liburcu-dev cmake bison flex

GANESHA_FSAL := $(BUILD_DIR)/libfsalcoldrise.so
GANESHA_SOURCES := $(addprefix plugins/ganesha/, main.c export.c handle.c file.c io.c)

# The headers are the system's in the eyes of the compiler: their warnings are not ours.
GANESHA_CFLAGS = -std=gnu11 -D_GNU_SOURCE -D_LARGEFILE64_SOURCE -D_FILE_OFFSET_BITS=64 \
    -O2 -g -fPIC -fvisibility=hidden -fno-strict-aliasing \
    -Wall -Wextra -Wshadow -Wstrict-prototypes -Wvla -Werror \
    -Iserver/capi/include -isystem $(GANESHA_DIR)/configured/include \
    -isystem $(GANESHA_SOURCE)/include -isystem /usr/include/ntirpc

# nfs-ganesha finds what the module registers by itself: no name leaves the file. Naming
# the library by its exact version makes the loader refuse any other.
GANESHA_LDFLAGS = -shared -Wl,--version-script=plugins/ganesha/fsal.syms \
    -Wl,-z,nodelete -Wl,-z,relro,-z,now -Wl,--gc-sections -Wl,-rpath,/usr/lib/ganesha

GANESHA_CMAKE = -DUSE_SYSTEM_NTIRPC=ON -DUSE_GSS=OFF -DUSE_DBUS=OFF -DUSE_9P=OFF \
    -DUSE_GTEST=OFF -DUSE_RADOS_RECOV=OFF -DRADOS_URLS=OFF \
    $(foreach fsal,CEPH RGW GLUSTER GPFS LUSTRE PROXY_V3 PROXY_V4 VFS XFS KVSFS LIZARDFS MEM NULL, \
        -DUSE_FSAL_$(fsal)=OFF)

# A deb-src line for this call alone, with lists of its own.
GANESHA_APT = -o Dir::Etc::SourceList=$(CURDIR)/$(GANESHA_DIR)/apt/sources.list \
    -o Dir::Etc::SourceParts=/dev/null -o Dir::State::Lists=$(CURDIR)/$(GANESHA_DIR)/apt/lists \
    -o Dir::Cache=$(CURDIR)/$(GANESHA_DIR)/apt/cache -o APT::Sandbox::User= -qq

.PHONY: ganesha-deps
ganesha-deps:
	$(call install,$(GANESHA_BUILD_PACKAGES))
	@test -e $(GANESHA_LIBRARY) || { \
	    echo "the FSAL is for nfs-ganesha $(GANESHA_VERSION) (Debian 12), and this machine has:" >&2; \
	    dpkg-query -W nfs-ganesha >&2; exit 1; }

$(GANESHA_DIR)/configured/include/config.h: plugins/ganesha/build.mk | ganesha-deps
	@echo "fetching and configuring nfs-ganesha's headers"
	@rm -rf $(GANESHA_DIR)
	@mkdir -p $(GANESHA_DIR)/apt/lists/partial $(GANESHA_DIR)/apt/cache/archives/partial
	@echo "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $(GANESHA_MIRROR) $(GANESHA_SUITE) main" \
	    > $(GANESHA_DIR)/apt/sources.list
	@apt-get $(GANESHA_APT) update
	@cd $(GANESHA_DIR) && apt-get $(GANESHA_APT) source --tar-only $(GANESHA_PACKAGE)
	@tar -C $(GANESHA_DIR) -xf $(GANESHA_DIR)/nfs-ganesha_$(GANESHA_VERSION).orig.tar.gz
	@cmake -S $(GANESHA_SOURCE) -B $(GANESHA_DIR)/configured $(GANESHA_CMAKE) \
	    > $(GANESHA_DIR)/cmake.log 2>&1 || { cat $(GANESHA_DIR)/cmake.log >&2; exit 1; }

.PHONY: ganesha-fsal
ganesha-fsal: build-deps ganesha-deps ## Build the FSAL for the NFS server
	@$(MAKE) --no-print-directory $(GANESHA_FSAL)

$(GANESHA_FSAL): $(GANESHA_SOURCES) plugins/ganesha/fsal_coldrise.h plugins/ganesha/fsal.syms \
    server/capi/include/coldrise.h server/capi/include/coldrise-folders.h \
    $(GANESHA_DIR)/configured/include/config.h $(BUILD_DIR)/libcoldrise_capi.a
	$(CC) $(GANESHA_CFLAGS) $(CFLAGS) -o $@.new $(GANESHA_SOURCES) \
	    $(BUILD_DIR)/libcoldrise_capi.a $(GANESHA_LDFLAGS) $(LDFLAGS) \
	    $(GANESHA_LIBRARY) -lntirpc -lrocksdb -lstdc++ -lgcc_s -lpthread -ldl -lm
	mv $@.new $@
