# From variables to lines.

plan() {
    echo "target $target"
    [ -z "$tag" ] || echo "tag $tag"
    for one in $envs; do
        echo "env ${one%%=*}=${one##*=}"
    done
    for one in $files; do
        echo "file $one"
    done
    [ -z "$dry" ] || echo "dry run"
}
