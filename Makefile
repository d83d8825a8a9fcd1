# ARGS goes to the training script or to pytest; PYTHON makes the environments; PIP_FLAGS= lets pip talk.
PYTHON ?= python3
PIP_FLAGS ?= --quiet --disable-pip-version-check --no-input
ARGS ?=

VENV := .venv
NEWEST := .venv-newest
SETUP := setup.cfg pyproject.toml

.PHONY: help train test test-newest bench clean
.DELETE_ON_ERROR:
.NOTPARALLEL:

help:
	@echo "make train        train MNIST on several XLA cores while the batch size follows traces/test_trace.csv"
	@echo "make test         ruff, mypy and every test"
	@echo "make test-newest  every test that needs no XLA, with the newest torch"
	@echo "make bench        every script of benchmarks/"
	@echo "make clean        remove the environments and what the tools leave behind"
	@echo
	@echo "Each sets up what it needs. make train ARGS='--epochs 1' passes flags on;"
	@echo "make PYTHON=python3.12 train chooses the interpreter (3.10 to 3.13; after make clean, if .venv is there)."

train: $(VENV)/.has-xla
	@$(if $(findstring --data-dir,$(ARGS)),,$(VENV)/bin/python test/helpers/mnist.py)
	$(VENV)/bin/python test/variable_train_mnist.py $(ARGS)

test: $(VENV)/.has-test
	$(VENV)/bin/python -m ruff check .
	$(VENV)/bin/python -m ruff format --check .
	$(VENV)/bin/python -m mypy
	$(VENV)/bin/python -m pytest $(ARGS)

# The package is installed here as a user would, not editable, and pytest's own command leaves the working folder
# off sys.path: what is tested is what the wheel holds.
test-newest:
	@rm -rf build
	$(call install,$(NEWEST),--upgrade torch ".[test]",test)
	@$(NEWEST)/bin/python -c "import importlib.util as u, sys; sys.exit(u.find_spec('torch_xla') and 'torch_xla came along')"
	@$(NEWEST)/bin/python -c "import torch; print('torch', torch.__version__)"
	$(NEWEST)/bin/pytest -m "not xla" $(ARGS)

bench: $(VENV)/.has-bench
	@set -e; for script in $$(grep -l __main__ benchmarks/*.py); do echo "$$script"; PYTHONPATH=test $(VENV)/bin/python "$$script" $(ARGS); done

clean:
	rm -rf $(VENV) $(NEWEST) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What each stamp of .venv stands for, as extras of setup.cfg.
EXTRAS_xla := xla
EXTRAS_test := xla test
EXTRAS_bench := xla test bench
comma := ,
space := $(subst ,, )

$(VENV)/.has-%: $(SETUP)
	@$(CHECK_PYTHON)
	@$(PYTHON) -c '$(CHECK_PLATFORM)'
	$(call install,$(VENV),-e ".[$(subst $(space),$(comma),$(EXTRAS_$*))]",$(EXTRAS_$*))

# install(environment, what, stamps): the stamps say that the environment is whole. They go before pip starts and come
# back when it has finished, so one whose installation was cut off is made anew, from pip's cache.
define install
	@$(CHECK_PYTHON)
	@ls $(1)/.has-* >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(1)
	@rm -f $(1)/.has-*
	@echo 'pip install $(2), into $(1) (the first time: several GB, some minutes)'
	@$(1)/bin/python -m pip install $(PIP_FLAGS) $(2)
	@touch $(3:%=$(1)/.has-%)
endef

CHECK_PYTHON = $(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' 2>/dev/null || { \
	echo "Python 3.10 to 3.13 is needed, but $(PYTHON) --version says: $$($(PYTHON) --version 2>&1); name another one," \
	"as in: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }

CHECK_PLATFORM = import platform as p; (p.system(), p.machine()) == ("Linux", "x86_64") or exit("torch_xla 2.9.0 has wheels \
	for Linux on x86_64 only, but this is %s on %s; pip install . and make test-newest do without it" \
	% (p.system(), p.machine()))
