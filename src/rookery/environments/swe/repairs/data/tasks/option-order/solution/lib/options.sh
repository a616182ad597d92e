# From words to variables: target, tag, envs, files, dry. `tags` tells whether there is a tag.

wrong() {
    printf 'deploy.sh: %s\n' "$1" >&2
    exit 2
}

add_env() {
    case $1 in
        [!=]*=*) envs+=("$1") ;;
        *) wrong "not NAME=VALUE: $1" ;;
    esac
}

parse() {
    local words=()
    tag= tags= envs=() dry=
    while [ $# -gt 0 ]; do
        case $1 in
            -t | --tag)
                [ $# -gt 1 ] || wrong "--tag needs a value"
                shift
                tag=$1 tags=yes
                ;;
            --tag=*) tag=${1#--tag=} tags=yes ;;
            -e | --env)
                [ $# -gt 1 ] || wrong "--env needs a value"
                shift
                add_env "$1"
                ;;
            --env=*) add_env "${1#--env=}" ;;
            -n | --dry-run) dry=yes ;;
            --)
                shift
                words+=("$@")
                break
                ;;
            -*) wrong "no such option: $1" ;;
            *) words+=("$1") ;;
        esac
        shift
    done
    [ ${#words[@]} -gt 0 ] || wrong "no target"
    target=${words[0]}
    files=("${words[@]:1}")
}
