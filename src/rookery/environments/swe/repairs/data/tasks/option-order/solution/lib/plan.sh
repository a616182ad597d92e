# From variables to lines.

plan() {
    printf 'target %s\n' "$target"
    [ -z "$tags" ] || printf 'tag %s\n' "$tag"
    local one
    for one in "${envs[@]}"; do
        printf 'env %s\n' "$one"
    done
    for one in "${files[@]}"; do
        printf 'file %s\n' "$one"
    done
    [ -z "$dry" ] || printf 'dry run\n'
    return 0
}
