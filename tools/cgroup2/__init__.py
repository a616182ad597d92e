"""Parts of `tools/run_cgroup2.py`: packages of the guest, its initramfs, the emulator, and its first process."""
