# ARGS is passed to the training script, to pytest, to the search or to the evaluation. JOBS=1 runs the tests in one
# process instead of one a core; an evaluation has two. PYTHON creates the environments. PIP_FLAGS= shows pip's output.
# GPU_PYTHON is an interpreter for test-gpu, which then installs nothing, and so is TPU_COMPILER for tpu-compiler.
PYTHON ?= python3
PIP_FLAGS ?= --quiet --disable-pip-version-check --no-input
GPU_PYTHON ?=
TPU_COMPILER ?=
ARGS ?=
JOBS ?= auto
TAG ?=
N ?= 1000
SEED ?=
NIGHTLY ?=
SOURCE ?= .
TRAINERS := $(wildcard benchmarks/trainers_*.py)
SHARED := benchmarks/records.py benchmarks/results.py benchmarks/fashion.py benchmarks/adaptive_tasks.py
SCRIPTS ?= $(filter-out $(SHARED) $(wildcard benchmarks/evaluation_[al]*.py) $(TRAINERS) $(wildcard benchmarks/tpu_*.py),$(wildcard benchmarks/*.py))

VENV := .venv
NEWEST := .venv-newest
INTEGRATIONS := .venv-integrations
DIST := .venv-dist
TPU := .venv-tpu
OLD_VENV := .venv-oldest
SETUP := setup.cfg pyproject.toml

# Tensors of tests are small: threads of several processes would only wait for one another, 90 times as long in one test.
test test-all test-newest test-integrations test-integrations-oldest test-gpu: export OMP_NUM_THREADS := 1
# A test that hangs for ten minutes shows where, and ends the run (an option of pytest 9, which test-gpu does not need): no
# worker takes the place of its process.
WATCHED := -o faulthandler_exit_on_timeout=true --max-worker-restart=0
PYTEST := pytest -n $(JOBS) --dist loadgroup $(WATCHED)

.PHONY: help train evaluate lint test test-all nightly test-newest test-integrations test-integrations-oldest test-gpu docs fuzz bench bench-trainers test-tpu tpu-compiler dist check-tag clean
.DELETE_ON_ERROR:
.NOTPARALLEL:

help:
	@echo "make train        train MNIST on several XLA cores while the batch size follows traces/test_trace.csv"
	@echo "make evaluate     compare rules on MNIST under two traces, and write a report to runs/evaluate"
	@echo "make lint         run ruff, mypy and the tests of words and messages"
	@echo "make test         run ruff, mypy and the quick tests, in 14 minutes on two cores"
	@echo "make test-all     run the slow tests, too"
	@echo "make nightly      run all tests, in all environments, with more examples of each property: some hours"
	@echo "make test-newest  run the tests that need no XLA, with the newest torch"
	@echo "make test-integrations  run the tests with transformers, accelerate, lightning, ignite, keras, jax and ray"
	@echo "make test-integrations-oldest  run some of them with the oldest versions that are supported"
	@echo "make test-gpu     run the tests and measurements that need a GPU, if there is one"
	@echo "make docs         build the documentation in build/docs"
	@echo "make fuzz N=5000  run N random trainings against a slow twin; SEED=1 repeats a search"
	@echo "make dist         build the wheel and the source distribution in dist/, and check them"
	@echo "make bench        measure with all scripts in benchmarks/; SCRIPTS=benchmarks/step.py selects one"
	@echo "make tpu-compiler  compile graphs for TPUs, which need not be there, and record what the compiler says"
	@echo "make clean        remove the environments, builds and caches"
	@echo
	@echo "Each target installs what it needs. make train ARGS='--epochs 1' passes flags to the script;"
	@echo "make PYTHON=python3.12 train selects the interpreter (3.10 to 3.14, with XLA to 3.13; run make clean first"
	@echo "if .venv exists)."

train: $(VENV)/.has-xla
	@$(if $(findstring --data-dir,$(ARGS)),,$(VENV)/bin/python test/helpers/mnist.py)
	$(VENV)/bin/python test/variable_train_mnist.py $(ARGS)

# At most 171 trainings of some seconds: each rule at its own learning rate, chosen on 3 seeds and judged on 5 others. The
# traces: a doubling batch with a fifth of the samples at each size, and a cluster of up to 8 devices that take two
# minutes for 64 samples, as those of a larger model would.
EVALUATE := --trace "0:32 200:64 300:128 350:256 375:512" --name doubling \
	--trace per-device:64@traces/synthetic_capacity.csv --name "a cluster" \
	--samples-per-second 0.5 --communication-seconds 4 --restart 120 --save-every 600 --devices 8 --price 1 \
	$(addprefix --rule ,constant linear root adascale) $(addprefix --lr-factor ,0.5 2) --samples 32768

evaluate: $(VENV)/.has-test
	$(VENV)/bin/vbs evaluate mnist-cnn $(EVALUATE) --jobs $(if $(filter auto,$(JOBS)),2,$(JOBS)) --folder runs/evaluate $(ARGS)

# A checkout that cannot be written has no caches.
LINT := $(if $(shell test -w . || echo no),export RUFF_NO_CACHE=true MYPY_CACHE_DIR=/dev/null && )$(VENV)/bin/python -m ruff check . && $(VENV)/bin/python -m ruff format --check . && $(VENV)/bin/python -m mypy

lint: $(VENV)/.has-test
	$(LINT)
	$(VENV)/bin/python -m pytest -q -p no:cacheprovider test/test_words.py test/test_docstrings.py

COMMA := ,
# Lint runs beside the tests. NIGHTLY=1 adds the longest tests to all of these targets.
SHORT := $(if $(NIGHTLY),,not nightly and)

test: SELECTED := not slow and not nightly and not cuda
test-all: SELECTED := $(SHORT) not cuda
test test-all: $(VENV)/.has-test
	@log=$$(mktemp); { $(LINT); } >"$$log" 2>&1 & lint=$$!; code=0; set -x; \
	$(VENV)/bin/python -m $(PYTEST) -m "$(SELECTED)" $(ARGS) || code=1; { set +x; } 2>/dev/null; \
	wait $$lint || code=1; cat "$$log"; rm -f "$$log"; exit $$code

nightly:
	$(MAKE) --keep-going NIGHTLY=1 test-all test-newest test-tpu test-integrations test-integrations-oldest \
	ARGS="--hypothesis-profile=all $(ARGS)"

# This target tests the wheel: the package is not installed in editable mode, and the command `pytest`, unlike
# `python -m pytest`, does not add the working directory to sys.path. Modules of an earlier build would be in the wheel.
# SOURCE is what the wheel is built from: a copy, if another installation is under way here.
test-newest:
	@rm -rf build/lib build/bdist.*
	$(call install,$(NEWEST),--upgrade torch "$(SOURCE)[test]",test)
	@$(NEWEST)/bin/python -c "import importlib.util as u, sys; sys.exit(u.find_spec('torch_xla') and 'torch_xla was installed too')"
	@$(NEWEST)/bin/python -c "import torch; print('torch', torch.__version__)"
	$(NEWEST)/bin/$(PYTEST) -m "not xla and not cuda$(if $(NIGHTLY),, and not nightly and (not slow or torch))" $(ARGS)

# Without a GPU this target says so and installs nothing. It tests the checkout; GPU_PYTHON needs the packages that
# the library imports at once (torch, numpy, pandas, tqdm, lazy_loader, typing_extensions), hypothesis and pytest>=8.
# COMMIT names what is measured where the copy has no .git.
GPUS = $(shell nvidia-smi -L 2>/dev/null | grep '^GPU')

test-gpu:
	$(if $(GPUS),$(call on-gpu,$(or $(GPU_PYTHON),$(NEWEST)/bin/python)),@echo "No GPU was found (nvidia-smi -L): nothing was tested or measured.")

# on-gpu(interpreter): the tests and, even if some fail, the measurements, which go to benchmarks/records.csv.
define on-gpu
	$(if $(GPU_PYTHON),,$(call install,$(NEWEST),--upgrade torch ".[test]",test))
	@$(1) -c 'import sys, torch; torch.cuda.is_available() or sys.exit("torch %s cannot use this GPU: update its driver, or pass GPU_PYTHON=..." % torch.__version__)'
	@code=0; set -x; PYTHONPATH=. $(1) -m pytest test/gpu -m cuda $(ARGS) || code=1; \
	PYTHONPATH=.:test $(1) benchmarks/gpu.py || code=1; \
	PYTHONPATH=. $(1) benchmarks/step.py --device cuda --pairs 21 || code=1; exit $$code
endef

# The newest versions of the trainers and of torch, apart from all other tests: none of them may be needed elsewhere.
# JAX has threads, with which the workers of loaders may not be forked: its tests run apart.
JAX := test/integrations/test_jax_loop.py docs/trainers/jax.md

test-integrations:
	$(call install,$(INTEGRATIONS),--upgrade -e ".[test-integrations$(if $(NIGHTLY),$(COMMA)test-optimizers)]",test)
	$(INTEGRATIONS)/bin/python -m mypy --follow-imports=silent variable_batch_size/integrations
	@code=0; set -x; $(INTEGRATIONS)/bin/python -m pytest $(WATCHED) -m "$(SHORT) not cuda" $(ARGS) $(JAX) || [ $$? -eq 5 ] || code=1; \
	INTEGRATIONS=1 $(INTEGRATIONS)/bin/python -m pytest -n $(JOBS) --dist loadfile $(WATCHED) -m "$(SHORT) not cuda" $(ARGS) $(JAX:%=--ignore=%) test/integrations docs/trainers \
	|| [ $$? -eq 5 ] || code=1; exit $$code # 5: ARGS selects none of these

# The oldest versions of the trainers that setup.cfg allows, over the other packages of that environment: weights, resumes
# and private names.
WEIGHTS := internals or whole_batches or yardstick or weights or resume
OLDEST = import configparser; c = configparser.ConfigParser(); c.read("setup.cfg"); e = c["options.extras_require"]; \
	names = [n for k in ("transformers", "accelerate", "lightning", "ignite", "keras") for n in e[k].split()]; \
	print(*sorted({n.replace(">=", "==") + ".0" * (n.count(".") < 2) for n in names}))
OLDEST_TESTS := $(wildcard test/integrations/test_*_internals.py) test/integrations/test_private_names.py \
	$(foreach name,transformers accelerate lightning ignite keras,test/integrations/test_$(name).py)

test-integrations-oldest:
	@ls $(INTEGRATIONS)/.has-test >/dev/null 2>&1 || $(MAKE) test-integrations ARGS=--collect-only
	@$(PYTHON) -m venv --clear $(OLD_VENV)
	@for site in $(CURDIR)/$(INTEGRATIONS)/lib/python*/site-packages; do echo "$$site"; done >$$(echo $(OLD_VENV)/lib/python*/site-packages)/newest.pth
	$(OLD_VENV)/bin/python -m pip install $(PIP_FLAGS) --no-deps $$($(PYTHON) -c '$(OLDEST)')
	$(OLD_VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile $(WATCHED) $(if $(NIGHTLY),,-k "$(WEIGHTS)") $(ARGS) $(OLDEST_TESTS)

docs: $(VENV)/.has-docs
	$(VENV)/bin/python -m sphinx -W --keep-going -q docs build/docs
	@echo "open build/docs/index.html"

fuzz: $(VENV)/.has-test
	PYTHONPATH=test $(VENV)/bin/python -m fuzz --number $(N) $(if $(SEED),--seed $(SEED)) $(ARGS)
	PYTHONPATH=test $(VENV)/bin/python -m fuzz.sums --number $(N) $(if $(SEED),--seed $(SEED))
	PYTHONPATH=test $(VENV)/bin/python -m fuzz.arrivals --number $(N) $(if $(SEED),--seed $(SEED))

bench: $(VENV)/.has-bench
	@set -e; for script in $(SCRIPTS); do echo "$$script"; PYTHONPATH=test $(VENV)/bin/python "$$script" $(ARGS); done

# The scripts of the trainers, in their own environment.
bench-trainers:
	@ls $(INTEGRATIONS)/.has-test >/dev/null 2>&1 || $(MAKE) test-integrations ARGS=--collect-only
	@set -e; for script in $(TRAINERS); do echo "$$script"; OMP_NUM_THREADS=1 PYTHONPATH=.:test:benchmarks $(INTEGRATIONS)/bin/python "$$script" $(ARGS); done

# The compiler of TPUs needs no TPU. Estimates of two versions differ, so they are pinned.
LIBTPU := "jax[cpu]==0.10.2" libtpu==0.0.52

test-tpu tpu-compiler: export TPU_COMPILER := $(or $(TPU_COMPILER),$(CURDIR)/$(TPU)/bin/python)

test-tpu: $(VENV)/.has-test
	$(if $(filter $(CURDIR)/%,$(TPU_COMPILER)),$(call install,$(TPU),$(LIBTPU),libtpu))
	$(VENV)/bin/python -m pytest $(WATCHED) $(if $(filter test-tpu,$(MAKECMDGOALS)),$(ARGS)) test/backend/test_tpu_compiler.py

tpu-compiler: test-tpu
	$(VENV)/bin/python benchmarks/tpu_compiler.py $(ARGS)

dist: check-tag
	@$(PYTHON) -m venv --clear $(DIST)
	@$(DIST)/bin/python -m pip install $(PIP_FLAGS) build twine
	@rm -rf dist build/lib build/bdist.* variable_batch_size.egg-info
	$(DIST)/bin/python -m build
	$(DIST)/bin/python -m twine check --strict dist/*
	$(DIST)/bin/python -m pip install $(PIP_FLAGS) lazy_loader  # all that an import needs; torch comes later
	$(DIST)/bin/python -m pip install $(PIP_FLAGS) --no-deps dist/*.whl
	$(DIST)/bin/python -I -c 'import variable_batch_size as vbs; print("imported", vbs.__version__, "from", vbs.__file__)'

# A release calls make dist TAG=v0.1.0: the tag, the package and the changelog have to name the same version.
check-tag:
	@version=$$(sed -n 's/^__version__ = "\(.*\)"$$/\1/p' variable_batch_size/__init__.py); [ -z "$(TAG)" ] || { \
	[ "$(TAG)" = "v$$version" ] && grep -q "^## \[$$version\] - 20..-..-..$$" CHANGELOG.md; } || { \
	echo "A release of $$version needs the tag v$$version and the heading '## [$$version] - YEAR-MONTH-DAY' in CHANGELOG.md," \
	"got the tag $(TAG) and the heading '$$(grep -m 1 '^## ' CHANGELOG.md)'" >&2; exit 1; }

clean:
	rm -rf $(VENV) $(NEWEST) $(INTEGRATIONS) $(OLD_VENV) $(DIST) $(TPU) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The extras of setup.cfg that each stamp file of .venv stands for (cluster: pooch, which fetches MNIST).
EXTRAS_xla := xla cluster
EXTRAS_docs := xla cluster docs
EXTRAS_test := xla cluster docs test
EXTRAS_bench := xla cluster docs test bench
comma := ,
space := $(subst ,, )

$(VENV)/.has-%: $(SETUP)
	@$(CHECK_PYTHON)
	@$(PYTHON) -c '$(CHECK_PLATFORM)'
	$(call install,$(VENV),-e ".[$(subst $(space),$(comma),$(EXTRAS_$*))]",$(EXTRAS_$*))

# install(environment, packages, stamps): a stamp file marks a complete environment. It is removed before pip starts and
# written after pip has finished, so an environment whose installation was interrupted is created again.
define install
	@$(CHECK_PYTHON)
	@ls $(1)/.has-* >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(1)
	@rm -f $(1)/.has-*
	@echo 'pip install $(2), into $(1) (the first time, this downloads several GB)'
	@$(1)/bin/python -m pip install $(PIP_FLAGS) $(2)
	@touch $(3:%=$(1)/.has-%)
endef

CHECK_PYTHON = $(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 15))' 2>/dev/null || { \
	echo "Python 3.10 to 3.14 is required, got $$($(PYTHON) --version 2>&1) from $(PYTHON); select another one, for" \
	"example: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }

CHECK_PLATFORM = import platform as p, sys; \
	(p.system(), p.machine()) == ("Linux", "x86_64") and sys.version_info < (3, 14) or exit("torch_xla 2.9.0 has wheels \
	for Python 3.10 to 3.13 on Linux and x86_64 only, got Python %s on %s and %s; run pip install . or make test-newest, \
	which do not need it" % (p.python_version(), p.system(), p.machine()))
