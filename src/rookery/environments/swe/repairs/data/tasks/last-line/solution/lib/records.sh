# Prints the records of a file, and counts them in `count`.
records() {
    local line LC_ALL=C
    while IFS= read -r line || [ -n "$line" ]; do
        case $line in *[!$' \t']*) ;; *) continue ;; esac
        printf '%s\n' "$line"
        count=$((count + 1))
    done < "$1"
}
