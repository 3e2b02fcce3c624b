# make bench KERNEL=k2    check and benchmark one stage (on a machine without a Hopper GPU: compile and inspect it)
# make test               lint and test; needs no GPU
# make test-torch TORCH=2.15.0    the library's tests with another PyTorch, in an environment of its own
# make site               the notes as a site in site/: open site/index.html
# make site-check         look for rendering errors of the site in headless Chromium
PYTHON ?= python3
KERNEL ?= k2
TORCH ?= 2.11.0
OF_TORCH := ops ops_policies production plans sdpa varlen huggingface huggingface_cache dtensor launch wrong_calls fp8 \
	production_fp8 decoding cache peers few_queries memory
READY := .venv/.ready

.PHONY: bench test test-torch check report site site-check clean

bench: $(READY)
	.venv/bin/python bench.py $(KERNEL)

test: $(READY)
	.venv/bin/python -m ruff check .
	.venv/bin/python -m pytest

test-torch: .venv-$(TORCH)/.ready
	.venv-$(TORCH)/bin/python -m pytest $(OF_TORCH:%=tests/test_%.py)

check: $(READY)
	.venv/bin/python ref_check.py $(KERNEL)

report: $(READY)
	.venv/bin/python -m harness.report
	.venv/bin/python -m harness.draw

site: $(READY)
	.venv/bin/python -m harness.site

site-check: site
	.venv/bin/python -m harness.site_check

$(READY): requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "Python 3.10 or newer is needed; name one with PYTHON=/path/to/python3"; exit 2; }
	@$(PYTHON) -m venv .venv || \
		{ echo "$(PYTHON) cannot create a virtual environment; on Debian: apt-get install python3-venv"; exit 2; }
	.venv/bin/python -m pip install --disable-pip-version-check -q -r requirements.txt
	@touch $@

.venv-%/.ready: requirements.txt
	@$(PYTHON) -m venv .venv-$*
	sed 's/^torch==.*/torch==$*/' requirements.txt >.venv-$*/requirements.txt
	.venv-$*/bin/python -m pip install --disable-pip-version-check -q -r .venv-$*/requirements.txt
	@touch $@

clean:
	rm -rf .venv .venv-* .pytest_cache .ruff_cache .site .cache site
