"""Checkpoints on the disks of the nodes, imported if a run saves to them.

- `local_tier`: directories and markers of a node, and saves to it
- `replication`: replicas of files on other nodes
- `distributed_local_checkpoint`: finds and reads a checkpoint whose files are on several nodes
- `copier`: copies of node-local checkpoints in the shared directory

`dist_checkpointing.local_checkpoints` is what the rest of the engine knows of them.
"""
