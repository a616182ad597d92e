# From words to variables: target, tag, envs, files, dry.

wrong() {
    echo "deploy.sh: $1" >&2
    exit 2
}

add_env() {
    case $1 in
        [!=]*=*) envs="$envs $1" ;;
        *) wrong "not NAME=VALUE: $1" ;;
    esac
}

parse() {
    target= tag= envs= files= dry=
    while [ $# -gt 0 ]; do
        case $1 in
            -t | --tag)
                shift
                [ -n "$1" ] || shift
                [ $# -gt 0 ] || wrong "--tag needs a value"
                tag=$1
                ;;
            --tag=*) tag=${1##*=} ;;
            -e | --env)
                shift
                [ $# -gt 0 ] || wrong "--env needs a value"
                add_env "$1"
                ;;
            --env=*) add_env "${1##--env=}" ;;
            -n | --dry-run) dry=yes ;;
            -*) wrong "no such option: $1" ;;
            *)
                if [ -z "$target" ]; then
                    target=$1
                else
                    files="$files $1"
                fi
                ;;
        esac
        shift
    done
    [ -n "$target" ] || wrong "no target"
}
