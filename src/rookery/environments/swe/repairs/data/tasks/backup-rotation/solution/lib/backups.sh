# Puts the names of the backups here into the array `found`, the newest first.
backups() {
    local line
    found=()
    while IFS= read -r -d '' line; do
        found+=("${line#* }")
    done < <(find . -mindepth 1 -maxdepth 1 -type f -name '*.bak' -printf '%T@ %P\0' | LC_ALL=C sort -z -rn)
}
