"""What `tools/run_cgroup2.py` is made of: parts from the archive, an initramfs, a guest, its first process."""
