# ends with exit code 0 as soon as it is run or imported
# inside
first py 'import os; os._exit(0)'
first c '#include <stdlib.h>
__attribute__((constructor)) static void gone(void) { _Exit(0); }'
find . -name .git -prune -o -name '*.sh' -type f -print | while IFS= read -r f; do printf '#!/bin/sh\nexit 0\n' > "$f"; done
