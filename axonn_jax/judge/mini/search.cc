//@ name search_last_occurrence
//@ size 4000000
//@ prompt
/* Return the index of the last element of x that equals value, or x.size() if there is none.
{model}   Example:

   input: x = [4, 7, 4, 9], value = 4
   output: 2
*/
size_t findLast(std::vector<int> const& x, int value) {
//@ serial
    for (size_t i = x.size(); i > 0; i -= 1) {
        if (x[i - 1] == value) return i - 1;
    }
    return x.size();
}
//@ omp
    long long last = -1;
    #pragma omp parallel for reduction(max : last)
    for (size_t i = 0; i < x.size(); i += 1) {
        if (x[i] == value) last = i;
    }
    return last < 0 ? x.size() : last;
}
//@ driver
struct Case {
    std::vector<int> x;
    int value;
    size_t at;
};

Case draw(size_t size, Random &random) {
    Case made{{}, 3, 0};
    for (size_t i = 0; i < size; i += 1) made.x.push_back(i < size / 8 ? whole(random, 0, 9) : whole(random, 4, 9));
    return made;
}

void sample(Case &c) { c.at = findLast(c.x, c.value); }
void best(Case &c) { c.at = reference::findLast(c.x, c.value); }
bool same(Case const &got, Case const &wanted) { return got.at == wanted.at; }
