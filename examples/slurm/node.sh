#!/usr/bin/env bash
# What runs on every node: the launcher with SIGUSR1 ignored. The ranks, its children, install a handler of their own,
# so a signal to the whole step reaches exactly them; without this it would kill the launcher.
trap '' USR1
exec "$@"
