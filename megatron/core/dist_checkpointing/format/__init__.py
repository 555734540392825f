"""The bytes on disk: metadata, torch's zip archives, the allow-list unpickler, checksums."""
