# One line for each group of lines with the same first field, and one for all.
BEGIN { FS = OFS = "\t" }

function end_group() {
    print region, count + 0, sum + 0
    count = sum = 0
}

# As texts: fields that look like numbers would be compared as numbers.
NR > 1 && ($1 "") != (region "") { end_group() }

{
    region = $1
    count++
    sum += $3
    all++
    total += $3
}

END {
    if (NR > 0)
        end_group()
    print "total", all + 0, total + 0
}
