# Prints the records of a file, and counts them in `count`.
records() {
    while read line; do
        [ -n "$line" ] || continue
        echo "$line"
        count=$((count + 1))
    done < "$1"
}
