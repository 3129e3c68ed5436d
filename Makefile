# The one door. No logic here: every target is `cargo xtask <target>`; ARGS are passed on.
#   make demo ARGS='--hold'
.DEFAULT_GOAL := help
.PHONY: help demo test test-cluster bench fuzz lint tidy alerts generate controlplane

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

demo: ## watch a GPU's load become replicas, on a real control plane with simulated GPU nodes
	@cargo xtask demo $(ARGS)

test: ## unit, process and apiserver levels, as CI runs them
	@cargo xtask test $(ARGS)

test-cluster: ## node and cluster levels, with real peers
	@cargo xtask test-cluster $(ARGS)

bench: ## figures against their budgets, as JSON lines
	@cargo xtask bench $(ARGS)

fuzz: ## random bodies against the exposition readers, for a minute
	@cargo xtask fuzz $(ARGS)

lint: ## format, clippy, structure, dependencies, generated files, manifests, dashboards
	@cargo xtask lint $(ARGS)

tidy: ## the structure part of lint alone
	@cargo xtask tidy $(ARGS)

alerts: ## the alert rules and their tests, with a real promtool
	@cargo xtask alerts $(ARGS)

generate: ## write the files that are derived from code
	@cargo xtask generate $(ARGS)

controlplane: ## find or build the control plane, print where it is
	@cargo xtask controlplane $(ARGS)
