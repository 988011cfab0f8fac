# Installation, units and the Debian package. Included by the top Makefile; run from the top folder.

PREFIX ?= /usr/local
# Folder of the libraries; Debian has one per architecture.
LIBDIR ?= $(PREFIX)/lib
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
DEB := build/coldrise_$(VERSION)_$(shell dpkg --print-architecture).deb

UNITS := coldrised.service coldrise-run@.service coldrise.slice coldrise-runs.slice

.PHONY: install
install: build web install-files ## Install below PREFIX (/usr/local)

# Writes the units to the folder $(1); they name the programs in the folder $(2).
define write-units
	install -d $(1)
	for unit in $(UNITS); do file=packaging/systemd/$$unit; test -e $$file || file=$$file.in; \
	    sed 's|@BINDIR@|$(2)|' $$file > $(1)/$$unit || exit 1; chmod 644 $(1)/$$unit; done
endef

# polkit reads no rules below /usr/local.
.PHONY: install-files
install-files:
	install -D -m 755 -t $(DESTDIR)$(PREFIX)/bin $(BUILD_DIR)/coldrise $(BUILD_DIR)/coldrised
	install -D -m 644 -t $(DESTDIR)$(LIBDIR)/nbdkit/plugins $(NBDKIT_PLUGIN) $(NBDKIT_PRELOAD)
	install -D -m 644 -t $(DESTDIR)$(LIBDIR)/coldrise $(FILES_KERNEL) $(FILES_INITRD)
	install -D -m 755 -t $(DESTDIR)$(LIBDIR)/coldrise $(BUILD_DIR)/coldrise-host
	test ! -e $(GANESHA_FSAL) || install -D -m 644 -t $(DESTDIR)$(LIBDIR)/ganesha $(GANESHA_FSAL)
	install -d $(addprefix $(DESTDIR)$(PREFIX)/share/,man/man1 man/man8 \
	    bash-completion/completions zsh/vendor-completions fish/vendor_completions.d)
	$(BUILD_DIR)/coldrise --quiet man $(DESTDIR)$(PREFIX)/share/man/man1
	$(BUILD_DIR)/coldrised man $(DESTDIR)$(PREFIX)/share/man/man8
	chmod 644 $(DESTDIR)$(PREFIX)/share/man/man8/coldrised.8
	$(BUILD_DIR)/coldrise completion bash > $(DESTDIR)$(PREFIX)/share/bash-completion/completions/coldrise
	$(BUILD_DIR)/coldrise completion zsh > $(DESTDIR)$(PREFIX)/share/zsh/vendor-completions/_coldrise
	$(BUILD_DIR)/coldrise completion fish > $(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/coldrise.fish
	$(call write-units,$(DESTDIR)$(PREFIX)/lib/systemd/system,$(PREFIX)/bin)
	install -D -m 644 packaging/systemd/sysusers.conf $(DESTDIR)$(PREFIX)/lib/sysusers.d/coldrise.conf
	install -D -m 644 packaging/systemd/polkit.rules $(DESTDIR)/usr/share/polkit-1/rules.d/50-coldrise.rules
	test -e $(DESTDIR)/etc/default/coldrise || install -D -m 644 packaging/coldrise.default $(DESTDIR)/etc/default/coldrise
	install -d $(DESTDIR)/etc/coldrise
	test ! -e $(WEB)/index.html || { rm -rf $(DESTDIR)$(PREFIX)/share/coldrise/web; \
	    install -d $(DESTDIR)$(PREFIX)/share/coldrise/web/assets; \
	    install -m 644 -t $(DESTDIR)$(PREFIX)/share/coldrise/web $$(find $(WEB) -maxdepth 1 -type f); \
	    install -m 644 -t $(DESTDIR)$(PREFIX)/share/coldrise/web/assets $(WEB)/assets/*; }

.PHONY: deb
deb: build ganesha-fsal web ## Build the Debian package in build/
	packaging/debian/build.sh $(DEB) $(VERSION)

# The limit is an exposure of 2.0. The programs need not be installed.
.PHONY: check-units
check-units:
	@rm -rf build/units
	@$(call write-units,build/units,/usr/bin)
	@sed -i 's|^ExecStart=[^ ]*|ExecStart=/usr/bin/true|' build/units/*.service
	SYSTEMD_UNIT_PATH=$(CURDIR)/build/units: systemd-analyze verify --man=no $(addprefix build/units/,$(UNITS))
	for unit in $(addprefix build/units/,$(filter %.service,$(UNITS))); do \
	    systemd-analyze security --offline=yes --threshold=20 $$unit | tail -n 1; test $${PIPESTATUS[0]} = 0 || exit 1; done
