# The S3 server of the tests. Included by the top Makefile, after vcsim's; run from the top folder.
#
# The sources come through the Go module proxy, pinned by go.sum. Building takes about a minute of processor time.

VERSITYGW := build/versitygw

$(VERSITYGW): $(addprefix tests/support/versitygw/,go.mod go.sum) $(if $(filter build/%,$(GO)),build/go/installed)
	GOTOOLCHAIN=local $(abspath $(GO)) build -C tests/support/versitygw -trimpath -buildvcs=false -o $(abspath $@) \
	    github.com/versity/versitygw/cmd/versitygw
	@touch $@
