# leaves more than anybody wants to carry
quiet truncate -s 10T huge; i=0; while [ $i -lt 300 ]; do echo x > many-$i; i=$((i+1)); done
